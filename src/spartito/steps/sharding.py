"""What strategies share whose replicas keep models in shards: homes, gradients, checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spartito.checkpoint.boxes import Cut, SpanCut
from spartito.checkpoint.saved import Saved
from spartito.checkpoint.saving import Unwritten
from spartito.collectives.pages import PAGE
from spartito.collectives.shared_memory import SharedMemoryCollective
from spartito.data.batch import Batch
from spartito.engine.gradients import Gradients, LocalGradients
from spartito.engine.loss import LossFunction
from spartito.engine.memory import give_back_memory
from spartito.engine.notes import value_of
from spartito.engine.optimizers import OptimizerLike, unwrap
from spartito.engine.precision import choose_precision
from spartito.engine.sharding.blocks import Members, divide
from spartito.engine.sharding.gathering import Shown, gather_around
from spartito.engine.sharding.gradients import ShardedGradients
from spartito.engine.sharding.hidden import asleep
from spartito.engine.sharding.homes import (
    GatheredHome,
    Home,
    SharedHome,
    WholeHome,
)
from spartito.engine.sharding.stage import Stage, make_stage
from spartito.engine.unmade import make_buffers, told
from spartito.errors import UserError
from spartito.local.joined import JoinedGroups
from spartito.local.values import Shards, Values
from spartito.steps.distributed import StepResult
from spartito.steps.pair import Pair
from spartito.steps.shards import (
    ALIKE,
    COPIES,
    SHARDS,
    ShardedCoordination,
    check_optimizer,
)
from spartito.steps.synchronous import SynchronousStep

BLOCK = 4 << 20
"""Bytes from which on a module is a block."""


def check_shards(zero: int, block_bytes: int) -> None:
    """Refuse shards that cannot be.

    Args:
        zero: The stage.
        block_bytes: From which size on a module is a block.

    Raises:
        UserError: They are not 1, 2 or 3, and 1 or more.
    """
    if zero not in (1, 2, 3):
        raise UserError(
            f"zero={zero!r}",
            "1 shards the optimizer's state, 2 the gradients too, 3 the parameters too.",
        )
    if block_bytes < 1:
        raise UserError(f"block_bytes={block_bytes}", "A block has 1 byte at least.")


class ShardingStep(SynchronousStep):
    """Replicas that keep models in shards, or each the whole of them.

    Those of the group `SHARDS` have a model between them; those of `COPIES` have the same shards.

    Args:
        zero: What is in shards, as under `ShardedStep`; 0: nothing is.
        block_bytes: From which size on a module is a block.
        **options: Of `SynchronousStep`.
    """

    coordination: ShardedCoordination

    def __init__(self, zero: int, block_bytes: int, **options: Any) -> None:
        self._zero, self._block_bytes = zero, block_bytes
        super().__init__(**options)
        self._members: list[Members] = []
        self._homes: dict[int, Home] = {}
        self._stage: Stage | None = None
        self._shown: dict[nn.Module, Shown] = {}
        self._hooks: list[RemovableHandle] = []
        self._learned: list[nn.Parameter] = []

    @property
    @abstractmethod
    def _owners(self) -> int:
        """How many tasks have a model between them."""

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
        if self._zero and self.tasks.world_size > 1:
            if choose_precision(precision, self.device) == "fp16":
                raise UserError(
                    f"precision='fp16' under {self.name}: its loss scale looks at whole gradients",
                    "Choose bf16, or mirrored.",
                )
            if isinstance(optimizer, Optimizer):
                check_optimizer(optimizer)
        with asleep():
            return super().prepare(
                model, optimizer, accumulate=accumulate, clip_norm=clip_norm, precision=precision,
                deterministic=deterministic, seed=seed,
            )  # fmt: skip

    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        gradients = self._pairs.only.gradients
        # On a mesh some gradients of a task are not whole before the backward pass ends.
        late = self._zero < 2 or self._synchronized or self._parts.world_size > 1
        if late or not isinstance(gradients, ShardedGradients):
            return super().step(batch, loss, stop=stop)
        with gradients.early():
            return super().step(batch, loss, stop=stop)

    @property
    def _holds_parts(self) -> bool:
        return self._owners > 1 or super()._holds_parts

    @property
    def _state_fraction(self) -> float:
        return 1 / self._owners

    @property
    def _has_shards(self) -> bool:
        """Whether there may be more replicas than this one, perhaps after a loss."""
        return self._zero > 0 and (self._own_shard[1] > 1 or self.recovery is not None)

    def _share(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        if not self._zero:
            super()._share(model, tensors)
        if not self._has_shards:
            return
        parameters = {id(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter)}
        super()._share(model, [tensor for tensor in tensors if id(tensor) not in parameters])
        self._settle(model)

    def _lay_out(self, model: nn.Module) -> None:
        if not self._zero:
            super()._lay_out(model)
            return
        make_buffers(model)
        if not self._has_shards or self.groups.joins:
            super()._lay_out(model)
        else:
            self._settle(model)

    def _settle(self, model: nn.Module) -> None:
        """Find homes for the parameters that have none, and bring the chief's values there.

        Who joins a training later gets all from the others, in `meet_again`.
        """
        known = [id(parameter) for each in self._members for parameter in each.parameters]
        known += [id(p) for p in model.parameters() if p.is_meta and self._parts.world_size > 1]
        members = divide(model, self._block_bytes, known)
        self._members += members
        if self.groups.joins:
            return
        if self._stage is None:
            self._stage = make_stage(self.groups[SHARDS])
        homes = list(self._make_homes(members, self._stage))
        for home in homes:
            self._fill_with_chiefs(home)
        self._move_in(model, homes)

    def values(self, pair: Pair, column: JoinedGroups) -> Values:
        """As `SynchronousStep.values`.

        Args:
            pair: A prepared one.
            column: Those who have the same, by their groups.
        """
        if ALIKE not in self.groups:
            if self._has_shards and self._zero == 3:
                raise UserError(
                    f"{self.name} with zero=3 inside {self._called}",
                    "Take zero=2: then each task has the values that groups merge.",
                )
            return super().values(pair, column)
        return Shards(pair.model, column, self.groups[ALIKE], self._homes)

    def _fill_with_chiefs(self, home: Home) -> None:
        data = self.groups.data  # all that have these parameters
        whole: Callable[[Tensor], Tensor] = partial(told, data)
        if home.is_shared and self.groups[SHARDS].world_size == data.world_size:
            whole = value_of if data.rank == 0 else Tensor.detach  # the first one's are all's
        with self.coordination.during("prepare"):
            home.fill(map(whole, home.parameters))

    def _move_in(self, model: nn.Module, homes: Sequence[Home]) -> None:
        """All shards have values: from now on ``model`` has its parameters there."""
        for home in homes:
            home.watches = self.recovery is not None
            self._homes |= {id(parameter): home for parameter in home.parameters}
        self.groups.world.barrier()
        give_back_memory()
        self._hooks += gather_around([home for home in homes if isinstance(home, GatheredHome)])
        if self._zero == 3:
            own = unwrap(model)  # of a compiled one
            found = (self._homes.get(id(parameter)) for parameter in own.parameters())
            of_model = [home for home in dict.fromkeys(found) if home is not None]
            self._shown.setdefault(own, Shown()).watch(own, of_model)

    def _make_homes(self, members: Sequence[Members], stage: Stage) -> Iterator[Home]:
        """A home for the values of each block; all replicas call this."""
        if self._zero < 3 or stage.group.world_size == 1:
            yield from (WholeHome(each, stage) for each in members)
        elif not isinstance(stage.group, SharedMemoryCollective):
            yield from (GatheredHome(each, stage) for each in members)
        else:
            sizes = [SharedHome.bytes_of(each, stage) for each in members]
            segment = stage.group.segment(max(PAGE, sum(sizes)), has_view=True)
            for number, each in enumerate(members):
                yield SharedHome(each, stage, segment, sum(sizes[:number]))

    def save(self, directory: Path, later: bool = False) -> Unwritten:
        with self._as_shards():
            return super().save(directory, later)

    def state_dict(self) -> dict[str, Any]:
        """All of model and optimizer, on all replicas, which all call this."""
        with self._as_shards():
            return super().state_dict()

    def _state(self, pair: Pair) -> dict[str, Any]:
        if isinstance(pair.gradients, ShardedGradients):
            pair.gradients.refresh()
            pair.gradients.adopt()
        return super()._state(pair)

    def _is_divided(self, pair: Pair) -> bool:
        return isinstance(pair.gradients, ShardedGradients) or super()._is_divided(pair)

    def _cuts(self, pair: Pair, section: str) -> Mapping[str, Cut]:
        if section == "accumulated" or (section == "model" and self._zero < 3):
            return {}
        found: dict[str, Cut] = {}
        for name, parameter in unwrap(pair.model).named_parameters(remove_duplicate=False):
            home = self._homes.get(id(parameter))
            if home is not None:
                span = home.span_of(parameter)
                whole = span.stop - span.start == parameter.numel()
                if section == "model" or not whole:
                    found[name] = SpanCut(tuple(parameter.shape), span.start, span.stop)
        return found

    def _load(self, saved: Saved) -> None:
        with self._as_shards():
            super()._load(saved)
        if self._zero == 3 or self.outer.has(self._pairs.only):
            for home in dict.fromkeys(self._homes.values()):
                home.loaded()

    @contextmanager
    def _as_shards(self) -> Generator[None]:
        """A block in which models show the elements that are this replica's."""
        for shown in self._shown.values():
            shown.as_shards = True
        try:
            with asleep():
                yield
        finally:
            for shown in self._shown.values():
                shown.as_shards = False

    def _gradients(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Gradients]:
        if not self._zero:
            return super()._gradients(model, optimizer)
        if not self._has_shards or self.groups.joins:
            return model, LocalGradients(optimizer)
        check_optimizer(optimizer)
        made = ShardedGradients(
            optimizer, self._group, self._homes, self.groups[SHARDS], self.groups[COPIES],
            self._learned,
        )  # fmt: skip
        return model, made

    def _optimize(self, pair: Pair) -> None:
        if self._has_shards:
            check_optimizer(pair.optimizer)
        super()._optimize(pair)
