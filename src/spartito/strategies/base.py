"""The seam between the trainer and every way of distributing it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.cluster.resolver import resolve
from spartito.cluster.spec import ClusterSpec, Task
from spartito.data.batch import Batch
from spartito.engine.loss import LossFunction
from spartito.engine.optimizers import OptimizerLike


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, the same on every replica but for ``output``.

    ``loss`` is the sum of the losses of all replicas since the last update and ``weight`` what
    it is to be divided by; both are 0 when the step only accumulated. ``output`` is the model's
    answer to this replica's rows, None where it had none. ``stop`` says that a replica asked
    for an end.
    """

    loss: float
    weight: float
    output: Any
    updated: bool
    stop: bool


class Distributed(Protocol):
    """One replica's share of a data set, an epoch at a time; it knows its place."""

    def __iter__(self) -> Iterator[Batch]:
        """From the present place to the end of the epoch; the next iteration is the next one."""
        ...

    def endless(self) -> Iterator[Batch]:
        """From the present place on, epoch after epoch."""
        ...

    def state(self) -> dict[str, int]:
        """The place of the next batch."""
        ...

    def load_state(self, state: dict[str, int]) -> None:
        """Go to that place."""
        ...


class Strategy(ABC):
    """How replicas share the work of a step. The trainer calls `step`, and asks for nothing else.

    Custom loops use the parts of a step: `distribute`, `backward`, `update`, `reduce`.
    """

    name: ClassVar[str]

    def __init__(self, cluster: ClusterSpec | None = None) -> None:
        """``cluster`` None asks the environment who takes part; `check` refuses what cannot be."""
        self.cluster = resolve() if cluster is None else cluster
        self.check(self.cluster)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that update together."""
        return self.cluster.num_replicas

    @property
    def is_chief(self) -> bool:
        """Whether this task writes files and prints."""
        return self.cluster.is_chief

    @property
    def task(self) -> Task:
        """Which task of the cluster this process is."""
        return self.cluster.task

    @abstractmethod
    def check(self, cluster: ClusterSpec) -> None:
        """Refuse a cluster that this strategy cannot run on, and name one that can. Pure."""

    def scope(self) -> AbstractContextManager[None]:
        """Where the model and its optimizer are built."""
        return nullcontext()

    @abstractmethod
    def prepare(
        self,
        model: nn.Module,
        optimizer: OptimizerLike,
        *,
        accumulate: int = 1,
        clip_norm: float | None = None,
        precision: str = "fp32",
        deterministic: bool = False,
        seed: int = 0,
    ) -> tuple[nn.Module, Optimizer]:
        """Take charge of a model and its optimizer; call once per pair, on every replica.

        Replicas start with the chief's values. ``accumulate`` batches make one update,
        ``clip_norm`` bounds the global norm of its gradients, ``precision`` is "fp32" (the
        model's own dtype) or "bf16" (autocast), ``deterministic`` gives one device's numbers.
        """

    @abstractmethod
    def distribute(self, dataset: Any, *, seed: int | None = None) -> Distributed:
        """This replica's share of ``dataset``, on its device; anything `as_dataset` takes."""

    @abstractmethod
    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        """Forward, backward and update of the one prepared pair.

        ``stop`` asks all replicas to end; the answer's ``stop`` tells whether anyone asked.
        """

    @abstractmethod
    def flush(self) -> StepResult | None:
        """Update with what was accumulated so far; None where there was nothing."""

    @abstractmethod
    def evaluate(self, batch: Batch, loss: LossFunction | None) -> tuple[float, float, Any]:
        """This replica's sum of losses, its weight, and the output, without a gradient."""

    @abstractmethod
    def predict(self, batch: Batch, has_loss: bool) -> Any:
        """The model's output for this replica's rows, without a gradient.

        A model that computes its own loss (``has_loss`` False) answers it beside the output in
        a dict: it is left out.
        """

    @abstractmethod
    def backward(self, losses: Any, batch: Batch) -> None:
        """Gradients of ``losses``: one per example, their mean, or (sum, weight)."""

    @abstractmethod
    def update(self, optimizer: Optimizer) -> None:
        """Reduce the gradients of ``optimizer``'s parameters, let it step, and clear them."""

    @abstractmethod
    def reduce(self, op: str, value: Tensor) -> Tensor:
        """``value`` over all replicas: "sum", "mean" (over all elements), "max" or "min"."""

    @abstractmethod
    def gather(self, rows: Tensor) -> Tensor:
        """The rows ``(n, ...)`` of all replicas in the order of their ranks, n may differ."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make equal what may differ between replicas: the running statistics of BatchNorm."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Model and optimizer under the user's names, equal on all replicas; all call it."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` answered, under any strategy and number of replicas."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group of replicas; calling it again changes nothing."""
