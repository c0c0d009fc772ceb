"""Groups of workers that train apart for some updates: under local SGD and parameter servers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spartito.declared import Declared
from spartito.errors import UserError
from spartito.names import divisors
from spartito.planning.costs.compute import own_step
from spartito.planning.costs.exchange import Exchange, all_reduce, machines_of
from spartito.planning.costs.parts import UPDATE, Situation, whole_number

EVERY = 20
"""Updates from one meeting to the next, unless the strategy says so; as its declaration has it."""


@dataclass(frozen=True, slots=True)
class Groups:
    """What a worker takes for a step in its group.

    Attributes:
        count: Of the groups.
        every: Updates from one meeting of all to the next; they meet at the end of an epoch too.
        members: Workers of the largest group.
        shares: Whether they are on one machine, which has the state of the optimizer once.
        own: Seconds of a worker's step by itself, by part.
        inside: What a group exchanges for an update.
    """

    count: int
    every: int
    members: int
    shares: bool
    own: dict[str, float]
    inside: Exchange


def groups_of(strategy: Declared, situation: Situation) -> Groups:
    """The groups that the options ``groups`` and ``every`` ask for.

    Args:
        strategy: With its options.
        situation: What is planned.

    Returns:
        Them, and what a step takes there.

    Raises:
        UserError: The workers are not divided evenly.
    """
    cluster = situation.cluster
    groups = whole_number(strategy, "groups", 2)
    every = interval(situation, whole_number(strategy, "every", EVERY))
    if cluster.tasks % groups:
        raise UserError(
            f"{groups} groups of {cluster.tasks} workers",
            f"It divides their number: {divisors(cluster.tasks)}.",
        )
    members = cluster.tasks // groups
    near = machines_of(situation, members)
    own = own_step(situation, situation.local_batch)
    if near == 1 and cluster.workers >= members:
        own[UPDATE] /= members
    inside = all_reduce(situation, situation.profile.model.gradients, members, near)
    return Groups(groups, every, members, near == 1, own, inside)


def interval(situation: Situation, every: int) -> int:
    """Updates between two meetings in the mean, where the end of an epoch is one.

    Args:
        situation: What is planned.
        every: What the strategy was told.
    """
    steps = situation.steps_per_epoch
    return every if steps is None else max(1, round(steps / math.ceil(steps / every)))
