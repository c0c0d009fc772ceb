"""Replicas that each keep a shard of gradients, optimizer state and parameters: ZeRO, FSDP."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spartito.checkpoint.boxes import Cut, SpanCut
from spartito.checkpoint.saved import Saved
from spartito.checkpoint.saving import Unwritten
from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import ClusterSpec
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
from spartito.engine.sharding.copies import check_group
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
from spartito.errors import TaskLostError, UserError
from spartito.names import divisors
from spartito.strategies.distributed import StepResult
from spartito.strategies.pair import Pair
from spartito.strategies.recovering import Standing, share_state
from spartito.strategies.resharding import Kept, load_rest, rest_of
from spartito.strategies.shards import (
    COPIES,
    SHARDS,
    ShardedCoordination,
    check_optimizer,
    connect,
)
from spartito.strategies.synchronous import SynchronousStrategy

BLOCK = 4 << 20
"""Bytes from which on a module is a block."""


class ShardedStrategy(SynchronousStrategy):
    """One model, kept in shards by the replicas that train it; each reads its own data shard.

    ZeRO (Rajbhandari et al. 2020): a replica keeps the optimizer's state of its shard (stage 1),
    the gradients' sums too (2), and of the parameters only what the module at work needs (3).
    On one machine stage 3 needs no gathering: the parameters exist once, in memory that all
    replicas read. Elsewhere a block is gathered before its module computes, forward and backward,
    and freed behind it; what else computes with its parameters has them gathered until the update.

    Parameters stay the user's own, under their names; an optimizer sees its replica's elements
    during its step. It must update each element by itself, as torch's Adam, SGD and most others
    do; the numbers are those of one device.

    Args:
        cluster: The tasks of the job; None asks the environment.
        zero: 1, 2 or 3: what is kept in shards.
        copies: How many times the model is kept (HSDP): a mesh of ``copies`` rows of replicas,
            of which each has all shards; rows are consecutive replicas. It divides their number.
        block_bytes: A module with so many bytes of parameters, or more, is a block of its own.
        offload: Keep shards in the host's memory; on CPUs they are.
        device: Where replicas compute: the CPU.
        sync_batchnorm: As in `MirroredStrategy`.
        timeout: Seconds that a wait for another task may take; None is ``SPARTITO_TIMEOUT``.
        communication: "auto", "sockets" or "process_group", as in `MirroredStrategy`.
        flush_denormals: As in `MirroredStrategy`.
        recovery: How `Trainer.fit` goes on when a task is lost; None asks ``SPARTITO_RECOVERY``.
            Each shard of parameters and optimizer's state is then kept twice more, in memory of
            the machine, or by the next task.

    Raises:
        UserError: For options or a device that it cannot have.
    """

    name = "sharded"
    _recovers = True
    coordination: ShardedCoordination

    def __init__(
        self,
        *,
        cluster: ClusterSpec | None = None,
        zero: int = 3,
        copies: int = 1,
        block_bytes: int = BLOCK,
        offload: bool = False,
        device: torch.device | str | None = None,
        sync_batchnorm: bool | None = None,
        timeout: float | None = None,
        communication: str = "auto",
        flush_denormals: bool = True,
        recovery: Recovery | None = None,
    ) -> None:
        if zero not in (1, 2, 3):
            raise UserError(
                f"zero={zero!r}",
                "1 shards the optimizer's state, 2 the gradients too, 3 the parameters too.",
            )
        if block_bytes < 1:
            raise UserError(f"block_bytes={block_bytes}", "A block has 1 byte at least.")
        if communication == "ddp":
            raise UserError("sharded with communication='ddp'", "Choose 'auto', or mirrored.")
        self._zero, self._copies, self._block_bytes = zero, copies, block_bytes
        super().__init__(
            cluster=cluster,
            device=device,
            sync_batchnorm=sync_batchnorm,
            timeout=timeout,
            communication=communication,
            flush_denormals=flush_denormals,
            recovery=recovery,
        )
        if self.device.type != "cpu":
            raise UserError(
                f"sharded on {self.device}: it runs on CPUs",
                "Choose mirrored or multi_worker_mirrored for GPUs, or device='cpu'.",
            )
        if offload:
            raise UserError(
                "offload=True on CPUs, whose memory is the host's already", "Leave it out."
            )
        world = self.cluster.world_size
        if copies < 1 or world % copies:
            raise UserError(
                f"copies={copies} of the model on {world} replicas",
                f"It divides their number: one of {divisors(world)}.",
            )
        if copies > 1 and self.recovery is not None:
            raise UserError(
                f"copies={copies} with recovery, which keeps copies of its own",
                "Leave one of them out.",
            )
        self.groups.connect = partial(connect, copies)
        self._members: list[Members] = []
        self._homes: dict[int, Home] = {}
        self._stage: Stage | None = None
        self._shown: dict[nn.Module, Shown] = {}
        self._hooks: list[RemovableHandle] = []
        self._learned: list[nn.Parameter] = []
        self._kept = Kept()
        self.coordination = ShardedCoordination(
            self.name, self.job, self.cluster, self._pairs, self.groups
        )
        self.coordination.homes = self._homes
        self.coordination.is_whole = zero < 3

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
        if self.num_replicas_in_sync > 1:
            if choose_precision(precision, self.device) == "fp16":
                raise UserError(
                    "precision='fp16' under sharded: its loss scale looks at whole gradients",
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
        if self._zero == 1 or self._synchronized or not isinstance(gradients, ShardedGradients):
            return super().step(batch, loss, stop=stop)
        with gradients.early():
            return super().step(batch, loss, stop=stop)

    @property
    def _holds_parts(self) -> bool:
        return self.num_replicas_in_sync > self._copies

    @property
    def _state_fraction(self) -> float:
        return self._copies / self.num_replicas_in_sync

    @property
    def _has_shards(self) -> bool:
        """Whether there may be more replicas than this one, perhaps after a loss."""
        return self.num_replicas_in_sync > 1 or self.recovery is not None

    def _share(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        if not self._has_shards:
            return
        parameters = {id(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter)}
        super()._share(model, [tensor for tensor in tensors if id(tensor) not in parameters])
        self._settle(model)

    def _lay_out(self, model: nn.Module) -> None:
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
        members = divide(model, self._block_bytes, known)
        self._members += members
        if self.groups.joins:
            return
        if self.recovery is not None:
            check_group(self.groups.world)
        if self._stage is None:
            self._stage = make_stage(self.groups[SHARDS])
        homes = list(self._make_homes(members, self._stage))
        for home in homes:
            self._fill_with_chiefs(home)
        self._move_in(model, homes)

    def _fill_with_chiefs(self, home: Home) -> None:
        whole: Callable[[Tensor], Tensor] = partial(told, self.groups.world)
        if home.is_shared and self._copies == 1:  # the chief writes them for all
            whole = value_of if self.is_chief else Tensor.detach
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
            self._shown.setdefault(own, Shown()).watch(own, homes)

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
        return isinstance(pair.gradients, ShardedGradients)

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
        self._kept.look(self._homes, self._pairs.all, is_settled=False)
        with self._as_shards():
            super()._load(saved)
        if self._zero == 3:
            for home in dict.fromkeys(self._homes.values()):
                home.loaded()
        if self.aboard is not None:
            self.keep_copies()

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
        if not self._has_shards or self.groups.joins:
            return model, LocalGradients(optimizer)
        check_optimizer(optimizer)
        made = ShardedGradients(
            optimizer, self.groups.data, self._homes, self.groups[SHARDS], self.groups[COPIES],
            self._learned,
        )  # fmt: skip
        return model, made

    def _optimize(self, pair: Pair) -> None:
        if self._has_shards:
            check_optimizer(pair.optimizer)
        keeps = self.aboard is not None  # a training that recovers
        if isinstance(pair.gradients, ShardedGradients):
            pair.gradients.are_met = keeps
        if keeps:
            self._kept.look(self._homes, self._pairs.all, is_settled=True)
        super()._optimize(pair)
        if keeps:
            self._kept.keep(self._homes, self._pairs.all)

    def keep_copies(self) -> None:
        if self.recovery is not None:
            self.coordination.settle()
            self._kept.join(self.groups.world, self.cluster.local_rank)
            self._kept.keep(self._homes, self._pairs.all)

    def regroup(self, cause: TaskLostError | None) -> bool:
        comes = cause is None and self._kept.is_current  # somebody, and nobody was lost
        self._kept.look(self._homes, self._pairs.all, is_settled=False)
        if comes:
            try:
                self.keep_copies()
            except TaskLostError as error:
                cause = error
        self._kept.is_current = False
        return super().regroup(cause)

    def meet_again(
        self, own: Standing, training: Callable[[], dict[str, Any]]
    ) -> tuple[Standing, dict[str, Any] | None]:
        if own.is_new:
            self._kept.forget()
        found = super().meet_again(own, training)
        self.keep_copies()
        return found

    def _share_all(
        self, own: Standing, training: Callable[[], dict[str, Any]]
    ) -> tuple[Standing, dict[str, Any] | None]:
        with self._as_shards():
            found = share_state(self._group, self._pairs.all, own, training, rest_of, load_rest)
        world, pairs = self.groups.world, self._pairs.all
        healing = self._kept.heal(world, self.cluster.local_rank, self._members, pairs)
        for home in dict.fromkeys(self._homes.values()):
            home.leave()
        for hook in self._hooks:
            hook.remove()
        for shown in self._shown.values():
            shown.homes = []
        self._hooks, self._learned = [], []
        self._homes.clear()
        self._stage = make_stage(self.groups[SHARDS])
        homes = list(self._make_homes(self._members, self._stage))
        for home in homes:
            if healing is None:
                self._fill_with_chiefs(home)
            else:
                self._learned += healing.fill(home)
        for pair in pairs:
            own_ones = {id(p) for p in unwrap(pair.model).parameters()}
            own_homes = [h for h in homes if id(h.parameters[0]) in own_ones]
            self._move_in(pair.model, own_homes)
        return found
