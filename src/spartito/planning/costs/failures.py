"""What failures of machines cost, as a part of the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spartito.planning.costs.parts import Situation


@dataclass(frozen=True, slots=True)
class Loss:
    """The part of the time that goes into saving, and into work done again.

    Attributes:
        fraction: Of all time; 1 where nothing is ever done.
        every: Seconds from one checkpoint to the next that lose the least; infinite for none.
        recovers: Whether the job has to be started with ``--recover`` for that.
    """

    fraction: float
    every: float
    recovers: bool = False


def checkpointed(save: float, rate: float, restart: float) -> Loss:
    """A job that goes on from its last checkpoint (Young 1974, Daly 2006, to first order).

    Args:
        save: Seconds that a checkpoint takes.
        rate: Failures a second, of all machines.
        restart: Seconds from a failure to the next step.
    """
    if rate <= 0:
        return Loss(0.0, math.inf)
    every = math.sqrt(2 * save / rate)
    return Loss(min(1.0, save / every + rate * (every / 2 + restart)), every)


def lost(situation: Situation, rate: float, asynchronous: bool) -> Loss:
    """What a job loses.

    One whose tasks wait for each other begins anew from its last checkpoint. Where they do not,
    the others train on while a lost worker comes back.

    Args:
        situation: What is planned.
        rate: Failures a second, of one machine.
        asynchronous: Whether workers do without each other.
    """
    machine, model = situation.profile.machine, situation.profile.model
    if asynchronous:
        return Loss(min(1.0, rate * machine.start), math.inf)
    save = (model.parameters + model.optimizer) / machine.disk
    return checkpointed(save, rate * situation.cluster.machines, machine.start)
