"""Equal copies on the devices of one machine."""

from __future__ import annotations

from dataclasses import dataclass

from spartito.steps.exchanges.all_reduce import AllReduce
from spartito.steps.parts import Parts
from spartito.steps.placements.replicated import replicas
from spartito.steps.team import Team
from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class MirroredStrategy(Strategy):
    """One replica per process, all on this machine: shared memory on CPUs, NCCL on GPUs.

    Args:
        find_unused_parameters: With "ddp": True searches in every step for parameters that get no
            gradient, False refuses them, None does what the first update needs.
    """

    name = "mirrored"
    recovers = True

    find_unused_parameters: bool | None = None

    def parts(self, team: Team) -> Parts:
        return replicas(team, AllReduce(team, find_unused=self.find_unused_parameters))
