"""Replicas that each keep a shard of gradients, optimizer state and parameters: ZeRO, FSDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from spartito.checkpoint.saved import Saved
from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import ClusterSpec
from spartito.engine.optimizers import unwrap
from spartito.engine.sharding.copies import check_group
from spartito.engine.sharding.gradients import ShardedGradients
from spartito.engine.sharding.stage import make_stage
from spartito.errors import TaskLostError, UserError
from spartito.names import divisors
from spartito.steps.groups import Connect
from spartito.steps.outer import Outer
from spartito.steps.pair import Pair
from spartito.steps.recovering import Standing, share_state
from spartito.steps.resharding import Kept, load_rest, rest_of
from spartito.steps.sharding import BLOCK, ShardingStep, check_shards
from spartito.steps.shards import SHARDS, ShardedCoordination, connect


class ShardedStep(ShardingStep):
    """What a task does of each step under `ShardedStrategy`."""

    name = "sharded"
    _recovers = True

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
        outer: Outer | None = None,
    ) -> None:
        check_shards(zero, block_bytes)
        if communication == "ddp":
            raise UserError("sharded with communication='ddp'", "Choose 'auto', or mirrored.")
        self._copies = copies
        super().__init__(
            zero,
            block_bytes,
            cluster=cluster,
            device=device,
            sync_batchnorm=sync_batchnorm,
            timeout=timeout,
            communication=communication,
            flush_denormals=flush_denormals,
            recovery=recovery,
            outer=outer,
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
        world = self.tasks.world_size
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
        self._kept = Kept()
        self.coordination = ShardedCoordination(
            self._called, self.job, self.cluster, self._pairs, self.groups, self._homes, zero < 3,
            self.outer,
        )  # fmt: skip

    @property
    def connect(self) -> Connect:  # type: ignore[override]
        return partial(connect, self._copies)

    @property
    def _owners(self) -> int:
        return self.tasks.world_size // self._copies

    def _settle(self, model: nn.Module) -> None:
        if self.recovery is not None and not self.groups.joins:
            check_group(self.groups.world)
        super()._settle(model)

    def _load(self, saved: Saved) -> None:
        self._kept.look(self._homes, self._pairs.all, is_settled=False)
        super()._load(saved)
        if self.aboard is not None:
            self.keep_copies()

    def _optimize(self, pair: Pair) -> None:
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
            new = [home for home in homes if id(home.parameters[0]) not in self._homes]
            own_homes = [home for home in new if id(home.parameters[0]) in own_ones]
            self._move_in(pair.model, own_homes)
        return found
