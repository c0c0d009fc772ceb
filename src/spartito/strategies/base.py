"""The seam between the trainer and every way of distributing it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito import heartbeat
from spartito.checkpoint.saving import Unwritten
from spartito.cluster.resolver import resolve
from spartito.cluster.spec import EVALUATOR, ClusterSpec, Task
from spartito.data.batch import Batch
from spartito.declared import Declared, described
from spartito.engine.denormals import Denormals
from spartito.engine.loss import LossFunction
from spartito.engine.optimizers import OptimizerLike, unwrap
from spartito.errors import UserError
from spartito.names import nearest
from spartito.registry import strategy_info, strategy_names
from spartito.strategies.coordination import Coordination, SynchronousCoordination
from spartito.strategies.distributed import Distributed, StepResult
from spartito.strategies.groups import Groups
from spartito.strategies.pair import Pairs


class Strategy(ABC):
    """How the tasks of a job compute a step together.

    The trainer calls `prepare`, `distribute`, `step`, `flush`, `evaluate`, `predict`, `save` and
    `load`; all else that it wants to know or agree on is in ``coordination``. Custom loops use
    the parts of a step: `distribute`, `backward`, `update`, `reduce`.

    Args:
        cluster: All tasks of the job; None asks the environment.
        flush_denormals: Whether denormal numbers are 0 where it computes.

    Raises:
        UserError: If `check` refuses the cluster.
    """

    name: ClassVar[str]
    coordination: Coordination
    """What the tasks agree on beside the computation."""
    groups: Groups
    """The groups that this task is in: "world", "data" and "model"."""
    declared: Declared
    """The strategy and the options that it was built with: its text form."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Note what it is built with."""
        made = super().__new__(cls)
        with suppress(TypeError):  # __init__ says what is wrong
            options = dict(signature(cls).bind(*args, **options).arguments)
        options.pop("cluster", None)
        made.declared = described(getattr(cls, "name", cls.__name__), options)
        return made

    def __str__(self) -> str:
        """Its text form, as ``local_sgd(every=20)``."""
        return str(self.declared)

    def __init__(self, cluster: ClusterSpec | None = None, flush_denormals: bool = True) -> None:
        self.denormals = Denormals(flush_denormals)
        self.job = resolve() if cluster is None else cluster
        if self.is_evaluator:
            self.cluster = self.job.apart()
        else:
            self.cluster = self.job
            self.check(self.cluster)
        heartbeat.begin()
        self._pairs = Pairs()
        self.groups = Groups.alone()
        self.coordination = SynchronousCoordination(
            self.name, self.job, self.cluster, self._pairs, self.groups
        )

    @property
    def task(self) -> Task:
        """Which task of the cluster this process is."""
        return self.job.task

    @property
    def is_chief(self) -> bool:
        """Whether this task writes files and prints."""
        return self.cluster.is_chief

    @property
    def is_evaluator(self) -> bool:
        """Whether this task stands outside the training and evaluates its checkpoints."""
        return self.job.task.type == EVALUATOR

    @property
    def data_shard(self) -> tuple[int, int]:
        """Which part of every global batch this task reads, as (index, count).

        Tasks that compute one part of the batch together have the same.
        """
        return self.cluster.rank, self.cluster.world_size

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that update together."""
        return self.data_shard[1]

    @property
    def num_replicas(self) -> int:
        """The copies of the model that compute; one may lie on several tasks."""
        return self.num_replicas_in_sync

    def check(self, cluster: ClusterSpec) -> None:
        """Refuse a cluster on which this strategy cannot run. Pure.

        Args:
            cluster: The tasks that would train.

        Raises:
            UserError: If it is refused; its hint names a strategy that can.
        """
        if self.name in strategy_names():
            servers = len(cluster.addresses.get("ps", ()))
            strategy_info(self.name).check(cluster.world_size, cluster.local_size, servers)

    def scope(self) -> AbstractContextManager[None]:
        """Where the model and its optimizer are built.

        Returns:
            A context manager, in which a strategy may decide where parameters are made.
        """
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
        """Take charge of a model and its optimizer; all tasks call it once per pair.

        The tasks meet here at the latest. Replicas start with the chief's values.

        Args:
            model: Any module; it is changed in place and moved to this task's device.
            optimizer: A fresh one, or a function of the parameters.
            accumulate: How many batches make one update of `step`.
            clip_norm: The largest global norm (L2) of an update's gradients; None: any.
            precision: "fp32" (the model's own dtype), "bf16" or "fp16" (autocast, the latter with
                a loss scale), "bf16-true" (a model in bf16), or Lightning's names of these.
            deterministic: Whether numbers are to be those of one device.
            seed: Orders the examples, and draws random numbers where ``deterministic``.

        Returns:
            The module to call, train and evaluate, and its optimizer.

        Raises:
            UserError: For a model, optimizer or setting that cannot be distributed.
            TaskLostError: If a task does not come within the time limit.
        """

    def using(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """A block in which `step`, `evaluate` and their like are about the pair of ``optimizer``.

        It is needed where one strategy has prepared several.

        Args:
            optimizer: The one that `prepare` returned.

        Returns:
            A context manager.
        """
        return self._pairs.using(optimizer)

    @abstractmethod
    def distribute(
        self, dataset: Any, *, seed: int | None = None, training: bool = True
    ) -> Distributed:
        """This task's data shard of ``dataset``, on its device.

        Args:
            dataset: Anything that `spartito.data.as_dataset` takes.
            seed: Shuffles where the data set has no seed of its own; None: that of `prepare`.
            training: False for evaluations, which not all tasks of a strategy may do.

        Returns:
            Batches to iterate over, epoch after epoch.
        """

    @abstractmethod
    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        """Forward, backward and update of the prepared pair.

        Args:
            batch: One of those that `distribute` gave.
            loss: A function of output and target; None for a model that computes its own.
            stop: Asks all tasks to end; the result's ``stop`` tells whether anyone asked.

        Returns:
            What the step did.
        """

    def flush(self) -> StepResult | None:
        """Update with what was accumulated so far.

        Returns:
            What the update did; None where nothing was accumulated.
        """
        return None

    @abstractmethod
    def evaluate(self, batch: Batch, loss: LossFunction | None) -> tuple[float, float, Any]:
        """The loss of one batch, without a gradient; all tasks call it, also those without rows.

        Args:
            batch: One of those that `distribute` gave.
            loss: A function of output and target; None for a model that computes its own.

        Returns:
            This task's sum of losses, its weight, and the output (None where it had no rows).
        """

    @abstractmethod
    def predict(self, batch: Batch, has_loss: bool) -> Any:
        """The model's output for this task's rows, without a gradient.

        Args:
            batch: One of those that `distribute` gave.
            has_loss: Whether there is a loss function. A model that computes its own returns it
                beside the output in a dict: it is left out.

        Returns:
            Tensors ``(rows, ...)``, in a tuple or dict where the model returns one.
        """

    @abstractmethod
    def save(self, directory: Path, later: bool = False) -> Unwritten:
        """Write model and optimizer, under the user's names, into a checkpoint; all tasks call it.

        No task needs more than its own part of them.

        Args:
            directory: A new directory on the chief's machine, which nobody reads before all is
                written. The chief has made it; where others write too they share it.
            later: Whether only a copy is taken now. What is returned writes it.

        Returns:
            What is still to be written: without ``later`` nothing.

        Raises:
            UserError: On all tasks, if it cannot be written, or replicas have drifted apart.
        """

    @abstractmethod
    def load(self, source: str | Path | Mapping[str, Any]) -> None:
        """Take back what `save` or a Trainer wrote, under any strategy and number of tasks.

        All tasks call it, after `prepare`.

        Args:
            source: The directory of one checkpoint, or sections of a state as
                ``{"model": model.state_dict()}``; what is not there stays as it is.

        Raises:
            UserError: If the model or the optimizer is another one.
        """

    def keep(self) -> Callable[[], None]:
        """Copy the values of the model, to go back to them in this process; all tasks call it.

        Returns:
            A function that all tasks call to put them back. Each keeps its own part of them.
        """
        state = unwrap(self._pairs.meant("keep()").model).state_dict().items()
        kept = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state}
        return partial(self.load, {"model": kept})

    def state_dict(self) -> dict[str, Any]:
        """All of model and optimizer in memory, for scripts that write their own files.

        Returns:
            The sections "model" and "optimizer" under the user's names; all tasks call it.

        Raises:
            UserError: If the strategy keeps no whole state on any task.
        """
        raise UserError(f"state_dict() under {self.name}", "Use save(directory).")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, under any strategy and number of tasks.

        Args:
            state: What `state_dict` returned.

        Raises:
            UserError: If the model or the optimizer is another one.
        """
        self.load(state)

    def backward(self, losses: Any, batch: Batch) -> None:
        """Compute gradients; for loops of one's own.

        Several calls before an update add up, as in torch: each is a mean over its own batch.

        Args:
            losses: One loss per example, their mean, or (sum, weight).
            batch: The batch that they are of.
        """
        raise self._owns_the_step("backward")

    def update(self, optimizer: Optimizer) -> None:
        """Reduce the gradients, let the optimizer step, and clear them; for loops of one's own.

        ``optimizer.step()`` after `backward` does the same.

        Args:
            optimizer: One that `prepare` returned.

        Raises:
            UserError: If `prepare` was told to accumulate, where tasks update together, or the
                gradients are not those of `backward`.
        """
        raise self._owns_the_step("update")

    def reduce(self, op: str, value: Tensor) -> Tensor:
        """Combine a tensor of every data shard; all tasks call it.

        Args:
            op: "sum", "mean" (over all elements), "max" or "min".
            value: A tensor of the same shape and dtype on all tasks; for "mean" of any shape.

        Returns:
            The same tensor on all tasks; for "mean" a scalar.

        Raises:
            UserError: For another ``op``.
        """
        value, group = value.detach(), self.groups.data
        with self.coordination.during("reduce"):
            if op == "sum":
                return group.all_reduce(value.clone())
            if op == "mean":
                wide = value.double()
                both = torch.stack([wide.sum(), wide.new_tensor(float(wide.numel()))])
                group.all_reduce(both)
                return both[0].div(both[1]).to(torch.promote_types(value.dtype, torch.float32))
            if op in ("max", "min"):
                parts = torch.stack(group.all_gather(value))
                return parts.amax(0) if op == "max" else parts.amin(0)
        raise UserError(f"reduce({op!r})", nearest(op, ("sum", "mean", "max", "min")))

    def gather(self, rows: Tensor) -> Tensor:
        """Put together the rows of all data shards; all tasks call it.

        Args:
            rows: ``(n, ...)``; n may differ.

        Returns:
            ``(sum of n, ...)`` in the order of the data shards, on all tasks.
        """
        with self.coordination.during("gather"):
            return torch.cat(self.groups.data.all_gather_rows(rows))

    def synchronize(self) -> None:
        """Make equal what may differ between replicas: the running statistics of BatchNorm."""
        self.coordination.synchronize()

    def close(self) -> None:
        """Leave all groups; calling it again changes nothing.

        After a loop of one's own, replicas that are to be equal are compared first.

        Raises:
            UserError: If they have drifted apart.
        """
        self.groups.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _owns_the_step(self, what: str) -> UserError:
        return UserError(
            f"{what}() under {self.name}, which owns the whole step",
            "Call step(), or choose mirrored or mesh for a loop of your own.",
        )
