"""What the tasks compute by themselves: a step of one device, on cores that others use, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from statistics import NormalDist

from spartito.planning.costs.exchange import Exchange
from spartito.planning.costs.parts import COMPUTE, INPUT, OTHERS, UPDATE, Cost, Rhythm, Situation
from spartito.planning.profile import PARTS


def own_step(situation: Situation, examples: float) -> dict[str, float]:
    """The seconds of one device's step, where all tasks of its machine make one.

    The slowest kind of machine counts: who waits for each other goes at its speed.

    Args:
        situation: What is planned.
        examples: That the task computes.

    Returns:
        Seconds by `INPUT`, `COMPUTE` and `UPDATE`.
    """
    found = {part: passes(situation, part, examples) for part in PARTS}
    return {
        INPUT: found["input"],
        COMPUTE: found["forward"] + found["backward"] + found["other"],
        UPDATE: found["update"],
    }


def passes(situation: Situation, part: str, examples: float) -> float:
    """The seconds of a part of a step, as `own_step` has them.

    Args:
        situation: What is planned.
        part: One of `PARTS`.
        examples: That the task computes.
    """
    profile, cluster = situation.profile, situation.cluster
    alone = profile.seconds(part, examples, cluster.threads)
    return alone * crowding(situation) / cluster.slowest


def crowding(situation: Situation) -> float:
    """How many times slower a task is that meets the others of its machine after each step.

    With more tasks than cores that is as measured, if it was; else they take `turns`.
    """
    beside, cores = situation.cluster.beside, situation.cluster.cores
    crowds = situation.profile.machine.crowds
    if beside <= cores or not crowds or cores != situation.profile.machine.cores:
        return turns(situation)
    points = sorted({cores: disturbed(situation), **crowds}.items())
    for (few, less), (many, more) in pairwise(points):
        if beside <= many:
            return less + (more - less) * (beside - few) / (many - few)
    return more * beside / many


def turns(situation: Situation) -> float:
    """How many times slower a task is on the core that has the most of them.

    With several tasks they share caches and memory.
    """
    return math.ceil(situation.cluster.beside / situation.cluster.cores) * disturbed(situation)


def disturbed(situation: Situation) -> float:
    """How many times slower a task is because others compute on the other cores."""
    cluster = situation.cluster
    others = min(cluster.beside, cluster.cores) - 1
    return 1 + situation.profile.machine.contention * others


def slowest_of(tasks: float, deviation: float) -> float:
    """By what part of its mean the last of so many tasks comes later (Blom 1958).

    Args:
        tasks: That begin together; their times are normal and independent.
        deviation: Of one, as a part of its mean.

    Returns:
        0 for one task.
    """
    if tasks <= 1:
        return 0.0
    return deviation * NormalDist().inv_cdf((tasks - 0.375) / (tasks + 0.25))


def waiting(situation: Situation, own: Mapping[str, float], tasks: float, steps: int = 1) -> float:
    """Seconds that a task waits for the slowest of those with which it meets.

    Args:
        situation: What is planned.
        own: What it does by itself between two meetings, by `own_step`, for one step.
        tasks: That meet.
        steps: From one meeting to the next.
    """
    deviation = situation.profile.deviation(situation.cluster.threads) / steps**0.5
    return sum(own.values()) * slowest_of(tasks, deviation)


def together(
    situation: Situation,
    own: Mapping[str, float],
    exchange: Exchange,
    memory: Mapping[str, float],
    replicas: int,
) -> Cost:
    """What a step takes in which all tasks meet.

    Args:
        situation: What is planned.
        own: The seconds of a task by itself, by `own_step`.
        exchange: What it exchanges with others.
        memory: What it has, by what that is.
        replicas: Tasks with the same parameters.

    Returns:
        That, and the wait for the slowest task.
    """
    waits = {OTHERS: waiting(situation, own, situation.cluster.tasks)}
    seconds = {**own, **exchange.seconds, **waits}
    return Cost(seconds, memory, exchange.sent, situation.batch, rhythm=Rhythm(replicas=replicas))
