"""The seam between the trainer and every way of distributing it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spartito.cluster.resolver import resolve
from spartito.cluster.spec import EVALUATOR, ClusterSpec, Task
from spartito.collectives.collective import Traffic
from spartito.data.batch import Batch
from spartito.engine.loss import LossFunction
from spartito.engine.optimizers import OptimizerLike
from spartito.errors import UserError
from spartito.registry import strategy_info, strategy_names

T = TypeVar("T")
Sums = Callable[[], list[float]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did.

    ``output`` is the model's answer to this replica's rows, None where it had none. The counts
    tell how far the whole training came since the last result, as this task knows: ``examples``
    trained on, global ``batches`` they make, and ``updates``, which are global steps. ``loss``
    is the sum of losses since the last update and ``weight`` what it is to be divided by; both
    are 0 when the step only accumulated. Strategies that meet in every step answer the same
    numbers on every replica. ``stop`` says that somebody asked for an end.
    """

    output: Any
    examples: int
    batches: int = 1
    updates: int = 0
    loss: float = 0.0
    weight: float = 0.0
    stop: bool = False


class Distributed(Protocol):
    """One replica's share of a data set; it knows its place."""

    waited: float
    """Seconds that iterating took so far because of other tasks, not because of the data."""

    goes_on: bool
    """Whether other tasks take up the next epoch while this one still evaluates the last."""

    def __iter__(self) -> Iterator[Batch]:
        """From the present place to the end of the epoch; the next iteration is the next one."""
        ...

    def epochs(
        self, count: int, steps: int | None, done: int, sums: Sums
    ) -> Generator[Generator[Batch]]:
        """The next ``count`` epochs of ``steps`` global batches, or of as many as there are.

        ``done`` batches of the first one were trained on before. ``sums`` answers this task's
        figures of the epoch so far; they are asked for where replicas do not meet in each step.
        """
        ...

    def total(self, shared: Sequence[float], own: Sequence[float]) -> list[float]:
        """The epoch's figures over all replicas: sums of step results, and this task's own."""
        ...

    def order(self) -> int:
        """A checksum of the examples of all batches so far, in their order; 0: not known."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The place of the next batch."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that place."""
        ...


class Strategy(ABC):
    """How replicas share the work of a step. The trainer calls `step`, and asks for nothing else.

    Custom loops use the parts of a step: `distribute`, `backward`, `update`, `reduce`.

    ``job`` is the whole cluster, ``cluster`` the tasks that this one works with: all, but for
    the evaluator, which is one replica alone under any strategy.
    """

    name: ClassVar[str]
    record_to: Path | None = None
    """The run folder, for tasks that end before the trainer could write there."""

    def __init__(self, cluster: ClusterSpec | None = None) -> None:
        """``cluster`` None asks the environment who takes part; `check` refuses what cannot be."""
        self.job = resolve() if cluster is None else cluster
        if self.is_evaluator:
            self.cluster = self.job.apart()
        else:
            self.cluster = self.job
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
    def is_evaluator(self) -> bool:
        """Whether this task stands outside the training and evaluates its checkpoints."""
        return self.job.task.type == EVALUATOR

    @property
    def leads(self) -> bool:
        """Whether this task sees the whole training: it evaluates, and its callbacks run."""
        return True

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """What this task exchanged with the others so far."""

    def describe(self) -> dict[str, Any]:
        """What a run's settings should tell of it, as JSON."""
        return {}

    @property
    def task(self) -> Task:
        """Which task of the cluster this process is."""
        return self.job.task

    def check(self, cluster: ClusterSpec) -> None:
        """Raise `UserError` for a cluster on which this strategy cannot run. Pure."""
        if self.name in strategy_names():
            servers = len(cluster.addresses.get("ps", ()))
            strategy_info(self.name).check(cluster.num_replicas, cluster.local_size, servers)

    def during(self, purpose: str) -> AbstractContextManager[None]:
        """A block whose calls to other tasks are for ``purpose``, which errors name."""
        return nullcontext()

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

    def using(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """A block in which `step`, `evaluate`, `state_dict` and their like are about the pair of
        ``optimizer``: several trainers may share a strategy.
        """
        return nullcontext()

    @abstractmethod
    def distribute(
        self, dataset: Any, *, seed: int | None = None, training: bool = True
    ) -> Distributed:
        """This replica's share of ``dataset``, on its device; anything `as_dataset` takes.

        ``training`` False is for evaluations, which not all tasks of a strategy may do.
        """

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
        """Gradients of ``losses``: one per example, their mean, or (sum, weight).

        Several calls before an update add up, as in torch: each is a mean over its own batch.
        """

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
    def lead(self, work: Callable[[], T]) -> T:
        """What ``work`` answers, plain values, on every task; only those that lead do it."""

    def tell_all(self, text: str) -> list[str]:
        """What every replica tells, by rank; all call it. Where they do not meet: ``[text]``."""
        return [text]

    def attempt(self, work: Callable[[], str]) -> list[str]:
        """What ``work`` returns on every replica, by rank; all call it, and leave together.

        Raises `UserError` on all of them if ``work`` does on one, which it names.
        """
        own: UserError | None = None
        try:
            mine = [work(), ""]
        except UserError as error:
            own, mine = error, ["", str(error)]
        told = [json.loads(text) for text in self.tell_all(json.dumps(mine))]
        if own is not None:
            raise own
        for rank, (_, failure) in enumerate(told):
            if failure:
                what, _, do = failure.partition("\n  ")
                raise UserError(f"{self.cluster.name_of(rank)}: {what}", do)
        return [found for found, _ in told]

    def compare_replicas(self, order: int = 0) -> None:  # noqa: B027 - not all meet
        """Raise `UserError` that names the replicas whose parameters are not those of the others.

        ``order`` is a checksum of the examples of an epoch, in their order: it must be equal too.
        Where replicas do not meet, nothing is compared.
        """

    @abstractmethod
    def agree_to_stop(self, asked: bool) -> bool:
        """At the end of an epoch: whether any task asked for an end of the training."""

    @abstractmethod
    def share_rates(self, optimizer: Optimizer) -> None:
        """Give all tasks the learning rates that the chief has chosen by its evaluation."""

    def failed(self, error: BaseException | None) -> None:  # noqa: B027 - most notice it anyway
        """``error``, if any, ends a training on this task: tell others that would not notice."""

    def follow(self, schedule: LRScheduler | None) -> None:  # noqa: B027 - few have to
        """``schedule`` steps once per global step; None: nobody knows the options to come.

        For strategies whose updates are made by other tasks than those that have the schedule.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Make equal what may differ between replicas: the running statistics of BatchNorm."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer under the user's names, equal on all replicas; all call it."""

    def go_on_accumulating(self, saved: dict[str, Any]) -> None:
        """Take up the batches since the last update: ``state_dict()["accumulated"]``.

        To be called after `load_state_dict`, in the middle of an epoch. Raises `UserError` if
        the number of batches of an update differs, or where updates cannot be made of other tasks'.
        """
        raise UserError(
            f"the checkpoint was written after {saved['batches']} of {saved['accumulate']} batches "
            f"of an update, which {self.name} cannot go on with",
            "Save after an update, or begin a whole epoch: fit(..., initial_epoch=N).",
        )

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, under any strategy and number of replicas."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group of replicas; calling it again changes nothing."""
