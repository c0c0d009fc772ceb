"""What failures of machines cost, as a part of the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spartito.planning.costs.parts import Situation

GOLDEN = (math.sqrt(5) - 1) / 2
MOST_FAILURES = 500.0
"""Between two checkpoints: more cannot be computed, nor survived."""


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


PAUSE = 2.0
"""Seconds that all tasks lose when one is lost, as `benchmarks.recovery` has measured."""


def checkpointed(save: float, rate: float, restart: float) -> Loss:
    """A job that begins anew from its last checkpoint (Daly 2006, equations 13 and 20).

    Failures have no memory. Seconds between two checkpoints take this time in the mean, saving,
    losses and restarts included; the interval that loses the least is searched.

    Args:
        save: Seconds that a checkpoint takes.
        rate: Failures a second, of all machines.
        restart: Seconds from a failure to the next step, in which there may be another one.

    Returns:
        What is lost; everything where a checkpoint is hardly ever reached.
    """
    if rate <= 0:
        return Loss(0.0, math.inf)

    def kept(every: float) -> float:
        if rate * (every + save + restart) > MOST_FAILURES:
            return 0.0
        return rate * every / (math.exp(rate * restart) * math.expm1(rate * (every + save)))

    low, high = 0.0, 2 / rate
    for _ in range(100):  # one maximum: golden sections
        near, far = low + (1 - GOLDEN) * (high - low), low + GOLDEN * (high - low)
        low, high = (low, far) if kept(near) >= kept(far) else (near, high)
    every = (low + high) / 2
    return Loss(1 - kept(every), every)


def recovered(rate: float, restart: float) -> Loss:
    """A job with ``--recover``: the others have what a lost task had, and wait for another one.

    Args:
        rate: Failures a second, of all machines.
        restart: Seconds until a replacement steps.
    """
    away = rate * (restart + PAUSE)
    return Loss(away / (1 + away), math.inf, recovers=True)


def lost(situation: Situation, rate: float, asynchronous: bool, recovers: bool = False) -> Loss:
    """What a job loses.

    One whose tasks wait for each other begins anew from its last checkpoint, or recovers. Where
    they do not wait, the others train on while a lost worker comes back.

    Args:
        situation: What is planned.
        rate: Failures a second, of one machine.
        asynchronous: Whether workers do without each other.
        recovers: Whether others have what a lost machine had.
    """
    machine, model = situation.profile.machine, situation.profile.model
    if asynchronous:
        away = rate * machine.start
        return Loss(away / (1 + away), math.inf)
    save, all_ = (model.parameters + model.optimizer) / machine.disk, situation.cluster.machines
    found = checkpointed(save, rate * all_, machine.start)
    if recovers and rate and all_ > 1:
        return min(recovered(rate * all_, machine.start), found, key=lambda each: each.fraction)
    return found
