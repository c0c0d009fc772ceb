"""Groups that train apart and meet every so many updates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from spartito.declared import Declared
from spartito.planning.costs.compute import waiting
from spartito.planning.costs.exchange import coded
from spartito.planning.costs.failures import PAUSE, Loss
from spartito.planning.costs.failures import lost as lost_together
from spartito.planning.costs.groups import EVERY, groups_of, interval
from spartito.planning.costs.memory import held
from spartito.planning.costs.parts import (
    OTHERS,
    Cost,
    Rhythm,
    Situation,
    check_options,
    whole_number,
)

OPTIONS: tuple[str, ...] = ("groups", "every", "compress")


def candidates(situation: Situation) -> Iterable[Mapping[str, Any]]:
    """As `Costs.candidates`: a group for each machine, or few, that meet often and seldom."""
    cluster = situation.cluster
    few = next((n for n in range(2, cluster.tasks) if cluster.tasks % n == 0), cluster.tasks)
    groups = cluster.machines if cluster.machines > 1 else max(2, few)
    codes = situation.profile.machine.codes if cluster.machines > 1 else ()
    known = {interval(situation, every): every for every in (100, EVERY)}  # short epochs: once
    for every in sorted(known.values()):
        yield {"groups": groups, "every": every}
        yield from ({"groups": groups, "every": every, "compress": code} for code in codes)


def lost(strategy: Declared, situation: Situation, rate: float, cost: Cost) -> Loss:
    """What a job that recovers loses: the others go on without a group until it is back.

    All of them notice it, and meet again. Groups that compress cannot recover.

    Args:
        strategy: With its options.
        situation: What is planned.
        rate: Failures a second, of one machine.
        cost: What a step takes.
    """
    if strategy.options.get("compress") or not rate:
        return lost_together(situation, rate, asynchronous=False)
    groups = whole_number(strategy, "groups", 2)
    all_ = situation.cluster.machines
    away = situation.profile.machine.start + cost.step * cost.rhythm.every / 2
    fraction = rate * max(1.0, all_ / groups) * away + rate * all_ * PAUSE
    return Loss(min(1.0, fraction), math.inf, recovers=True)


def cost(strategy: Declared, situation: Situation) -> Cost:
    """As `Costs.cost`: a step, with its part of a meeting."""
    check_options(strategy, OPTIONS)
    cluster, model = situation.cluster, situation.profile.model
    groups = groups_of(strategy, situation)
    count, every, members, own = groups.count, groups.every, groups.members, groups.own
    inside = groups.inside * (1 / situation.profile.accumulate)
    apart = min(count, cluster.machines)
    compress = strategy.options.get("compress")
    meeting = coded(situation, model.parameters, max(count, apart), apart, compress)
    copies = situation.profile.machine.copy * 2 * model.parameters
    exchange = inside + meeting * (1 / every)
    seconds = {**own, **exchange.seconds}
    seconds["memory"] += copies / every
    seconds[OTHERS] = waiting(situation, own, members) + waiting(situation, own, count, every)
    memory = held(
        situation,
        situation.local_batch,
        parameters=2.0 if compress is None else 3.0,
        optimizer=1 / members if groups.shares else 1.0,
        exchange=model.gradients * (1 + (members > 1)),
    )
    said = (
        f"{count} models drift apart for {every} updates, which are of "
        f"{situation.batch / count:.3g} examples: the goal may take more of them",
    )
    rhythm = Rhythm(group=members, every=every, replicas=members)
    return Cost(seconds, memory, exchange.sent, situation.batch, said, rhythm)
