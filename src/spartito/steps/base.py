"""What every way of distributing a step is to a strategy, which has the words for users."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito import heartbeat
from spartito.checkpoint.saving import Unwritten
from spartito.cluster.recovery import Recovery
from spartito.cluster.resolver import resolve
from spartito.cluster.spec import EVALUATOR, ClusterSpec, Task
from spartito.data.batch import Batch
from spartito.engine.denormals import Denormals
from spartito.engine.loss import LossFunction
from spartito.engine.optimizers import OptimizerLike, unwrap
from spartito.errors import UserError
from spartito.names import nearest
from spartito.registry import strategy_info, strategy_names
from spartito.steps.coordination import Coordination, SynchronousCoordination
from spartito.steps.distributed import Distributed, StepResult
from spartito.steps.groups import Groups
from spartito.steps.outer import EveryStep, Outer
from spartito.steps.pair import Pairs


class Step(ABC):
    """What one task does of the steps of a `Strategy`.

    Args:
        cluster: All tasks of the job; None asks the environment.
        flush_denormals: Whether denormal numbers are 0 where it computes.
        outer: What stands around the steps of a group of tasks.

    Raises:
        UserError: If `check` refuses the cluster.
    """

    name: ClassVar[str]
    coordination: Coordination
    """What the tasks agree on beside the computation."""
    recovery: Recovery | None = None
    """How `Trainer.fit` goes on when a task is lost; None: it ends."""
    groups: Groups
    """The groups that this task is in: "world", "data" and "model"."""

    def __init__(
        self,
        cluster: ClusterSpec | None = None,
        flush_denormals: bool = True,
        outer: Outer | None = None,
    ) -> None:
        self.outer: Outer = outer or EveryStep()
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
            self._called, self.job, self.cluster, self._pairs, self.groups, self.outer
        )

    @property
    def _called(self) -> str:
        """What the user calls it."""
        return self.outer.name or self.name

    @property
    def tasks(self) -> ClusterSpec:
        """The tasks whose steps these are, by their ranks among them: those of one's own group."""
        return self.outer.inside(self.cluster)

    @property
    def task(self) -> Task:
        """As `Strategy.task`."""
        return self.job.task

    @property
    def is_chief(self) -> bool:
        """As `Strategy.is_chief`."""
        return self.cluster.is_chief

    @property
    def is_evaluator(self) -> bool:
        """As `Strategy.is_evaluator`."""
        return self.job.task.type == EVALUATOR

    @property
    def data_shard(self) -> tuple[int, int]:
        """As `Strategy.data_shard`."""
        return self.outer.data_shard(self._own_shard, self.cluster)

    @property
    def _own_shard(self) -> tuple[int, int]:
        """Which part this task reads of what one's own group does."""
        return self.tasks.rank, self.tasks.world_size

    @property
    def num_replicas_in_sync(self) -> int:
        """As `Strategy.num_replicas_in_sync`."""
        return self.data_shard[1]

    @property
    def num_replicas(self) -> int:
        """As `Strategy.num_replicas`."""
        return self.num_replicas_in_sync

    def check(self, cluster: ClusterSpec) -> None:
        """As `Strategy.check`."""
        own = self.outer.inside(cluster)
        for name, tasks in ((self.outer.name, cluster), (self.name, own)):
            if name in strategy_names():
                servers = len(cluster.addresses.get("ps", ()))
                strategy_info(name).check(tasks.world_size, tasks.local_size, servers)

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
        """As `Strategy.prepare`."""

    def using(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """As `Strategy.using`."""
        return self._pairs.using(optimizer)

    @abstractmethod
    def distribute(
        self, dataset: Any, *, seed: int | None = None, training: bool = True
    ) -> Distributed:
        """As `Strategy.distribute`."""

    @abstractmethod
    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        """As `Strategy.step`."""

    def flush(self) -> StepResult | None:
        """As `Strategy.flush`."""
        return None

    @abstractmethod
    def evaluate(self, batch: Batch, loss: LossFunction | None) -> tuple[float, float, Any]:
        """As `Strategy.evaluate`."""

    @abstractmethod
    def predict(self, batch: Batch, has_loss: bool) -> Any:
        """As `Strategy.predict`."""

    @abstractmethod
    def save(self, directory: Path, later: bool = False) -> Unwritten:
        """As `Strategy.save`."""

    @abstractmethod
    def load(self, source: str | Path | Mapping[str, Any]) -> None:
        """As `Strategy.load`."""

    def keep(self) -> Callable[[], None]:
        """As `Strategy.keep`."""
        state = unwrap(self._pairs.meant("keep()").model).state_dict().items()
        kept = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state}
        return partial(self.load, {"model": kept})

    def state_dict(self) -> dict[str, Any]:
        """As `Strategy.state_dict`."""
        raise UserError(f"state_dict() under {self.name}", "Use save(directory).")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Strategy.load_state_dict`."""
        self.load(state)

    def backward(self, losses: Any, batch: Batch) -> None:
        """As `Strategy.backward`."""
        raise self._owns_the_step("backward")

    def update(self, optimizer: Optimizer) -> None:
        """As `Strategy.update`."""
        raise self._owns_the_step("update")

    def reduce(self, op: str, value: Tensor) -> Tensor:
        """As `Strategy.reduce`."""
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
        """As `Strategy.gather`."""
        with self.coordination.during("gather"):
            return torch.cat(self.groups.data.all_gather_rows(rows))

    def synchronize(self) -> None:
        """As `Strategy.synchronize`."""
        self.coordination.synchronize()

    def close(self) -> None:
        """As `Strategy.close`."""
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
