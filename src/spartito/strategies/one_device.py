"""One replica: the case that all others are compared with."""

from __future__ import annotations

from dataclasses import dataclass

from spartito.steps.exchanges.all_reduce import AllReduce
from spartito.steps.parts import Parts
from spartito.steps.placements.replicated import replicas
from spartito.steps.team import Team
from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class OneDeviceStrategy(Strategy):
    """Everything on one device of one process."""

    name = "one_device"
    nests = False

    def parts(self, team: Team) -> Parts:
        return replicas(team, AllReduce(team))
