"""One copy of the parameters in memory that all replicas compute with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spartito.collectives.membership.ways import THROUGH_HOST
from spartito.steps.exchanges.one_copy import OneCopy, OneMemory, check_devices
from spartito.steps.parts import Parts
from spartito.steps.placements.replicated import Replicated
from spartito.steps.team import Team
from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class CentralStorageStrategy(Strategy):
    """Replicas of one machine and one copy of the parameters, in memory that all of them share.

    On CPUs they compute with that copy, read in place. On accelerators each has the values for a
    step: gradients come to the host, which keeps the optimizer's state, and new values go back.

    Each replica adds up the gradients of its part of the elements, updates it in place, and holds
    the optimizer's state of that part alone; the numbers are those of one device. torch's
    Adafactor, Muon and the like, which look at whole parameters, get whole ones, after a sum as in
    mirrored, and so does all in fp16. An optimizer that is not one of torch's own may look at all
    parameters at once: the chief updates them all. Each replica has its own buffers.

    What a replica writes into a parameter, all of them see, also after `close`: a script that
    changes parameters by itself does so on the chief only, after an update. Hooks on the steps of
    the optimizer are refused: a step has only a part of the gradients and of the new values.

    Args:
        parameter_device: "cpu", the host's memory.
    """

    name = "central_storage"
    nests = False
    without = ("communication", "recovery")

    parameter_device: torch.device | str = "cpu"

    def parts(self, team: Team) -> Parts:
        check_devices(self.parameter_device)
        team.communication = THROUGH_HOST
        exchange = OneCopy(team)
        return Parts(OneMemory(), Replicated(team, exchange), exchange)
