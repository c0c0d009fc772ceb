"""What replicas that keep shards agree on: groups, optimizers, values written beside updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective, IdentityCollective
from spartito.collectives.rendezvous import WORLD, Rendezvous
from spartito.engine import fused
from spartito.engine.divided import ELEMENTWISE
from spartito.engine.optimizers import optimizer_parameters
from spartito.engine.sharding.homes import Home, settle_all
from spartito.errors import UserError
from spartito.steps.coordination import SynchronousCoordination, compare_values
from spartito.steps.groups import DATA, MODEL, Groups
from spartito.steps.outer import Outer
from spartito.steps.pair import Pairs

SHARDS, COPIES = "shards", "copies"
ALIKE = "same shard"
"""Those of other groups that train apart, and have the same shard of a model."""


class ShardedCoordination(SynchronousCoordination):
    """Replicas that do not each have all values; what they wrote into these is settled first.

    Args:
        name: As under `Coordination`.
        job: Likewise.
        cluster: Likewise.
        pairs: Likewise.
        groups: As under `SynchronousCoordination`.
        homes: Of all parameters, by their ids; none where nothing is in shards.
        is_whole: Whether each replica has all values of the parameters nevertheless.
        outer: As under `SynchronousCoordination`.
    """

    def __init__(
        self,
        name: str,
        job: ClusterSpec,
        cluster: ClusterSpec,
        pairs: Pairs,
        groups: Groups,
        homes: Mapping[int, Home],
        is_whole: bool,
        outer: Outer,
    ) -> None:
        super().__init__(name, job, cluster, pairs, groups, outer)
        self._homes, self._is_whole = homes, is_whole

    def compare(self, order: int = 0) -> None:
        if self._is_whole or ALIKE not in self.groups:
            self.settle()
            super().compare(order)
            return

        def compare() -> str:  # all groups hear of it, not only those with the same shard
            self.settle()
            return self._compare(order)

        self.attempt(compare)
        self.compare_buffers()
        self._pairs.unseen = False

    def _compare(self, order: int) -> str:
        super()._compare(order)
        if not (self._is_whole or self._outer.is_apart) and ALIKE in self.groups:
            own = [home.own for home in dict.fromkeys(self._homes.values())]
            compare_values(self.groups[ALIKE], own)
        return ""

    def settle(self) -> None:
        """Make what all have written into parameters their values; all call this."""
        settle_all(dict.fromkeys(self._homes.values()), self._writing)

    @property
    def _writing(self) -> Collective:
        """Who writes the same into parameters."""
        return self.groups.replicas

    def checksum(self, parameters: Sequence[nn.Parameter]) -> int:
        return super().checksum(parameters) if self._is_whole else 0


def connect(copies: int, rendezvous: Rendezvous, cluster: ClusterSpec) -> dict[str, Collective]:
    """The groups of all replicas, and the rows and columns of the mesh of copies and shards."""
    world, alone = rendezvous.group(), IdentityCollective()
    found: dict[str, Collective] = {WORLD: world, DATA: world, MODEL: alone}
    if copies == 1:
        return {**found, SHARDS: world, COPIES: alone}
    size = cluster.world_size // copies
    row = cluster.rank - cluster.rank % size
    column = range(cluster.rank % size, cluster.world_size, size)
    return {
        **found,
        SHARDS: rendezvous.group(SHARDS, range(row, row + size)) if size > 1 else alone,
        COPIES: rendezvous.group(COPIES, column),
    }


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse one whose step on a shard is not a part of its step."""
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE and optimizer_parameters(optimizer):
        raise UserError(
            f"{name} under sharded: it may look at whole parameters, and a replica has parts",
            "Choose AdamW, SGD or another that updates each element by itself, or mirrored.",
        )
    if fused.has_hooks(optimizer):
        raise UserError(
            f"an {name} with hooks on its steps under sharded",
            "A replica's step has only its shard of the gradients and of the new values: "
            "choose mirrored, or do it before or after strategy.update.",
        )
