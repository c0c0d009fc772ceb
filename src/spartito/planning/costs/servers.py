"""Asynchronous workers over parameter servers: a closed network of queues.

A worker pulls the values, computes its part of a batch, and pushes gradients; each server serves
one push after the other. Exact mean value analysis (Reiser and Lavenberg 1980) gives the time in
the queue. Cores that servers and workers use together limit the rate, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spartito.declared import Declared
from spartito.planning.costs.compute import own_step, waiting
from spartito.planning.costs.exchange import message
from spartito.planning.costs.groups import groups_of
from spartito.planning.costs.memory import held
from spartito.planning.costs.parts import (
    CORES,
    LINK,
    MEMORY,
    OTHERS,
    SERVERS,
    UPDATE,
    Cost,
    Rhythm,
    Situation,
    check_options,
)

OPTIONS: tuple[str, ...] = ("groups", "every")


def candidates(situation: Situation) -> Iterable[Mapping[str, Any]]:
    """As `Costs.candidates`: without a bound on staleness, and a group for each machine."""
    yield {}
    if situation.cluster.machines > 1:
        yield {"groups": situation.cluster.machines, "every": 100}


def cost(strategy: Declared, situation: Situation) -> Cost:
    """As `Costs.cost`: a step is one push of every worker."""
    check_options(strategy, OPTIONS)
    if "groups" in strategy.options:
        return _apart(strategy, situation)
    cluster, model, machine = (
        situation.cluster,
        situation.profile.model,
        situation.profile.machine,
    )
    tasks, servers = cluster.tasks, cluster.ps
    own = own_step(situation, situation.local_batch)
    update = own.pop(UPDATE)
    crosses = cluster.machines > 1
    push = message(situation, model.gradients, crosses)
    pull = message(situation, model.parameters, crosses)
    moved = push + pull
    work = update + machine.copy * (model.gradients + model.parameters)
    served = _served(situation, work, max(model.gradients, model.parameters))
    own[MEMORY], own[LINK] = moved.memory, moved.link
    cycle = sum(own.values()) * cluster.slowest / cluster.mean_speed
    queue = queueing(tasks, cycle, served)
    busy = (sum(own.values()) - moved.link) * tasks / cluster.machines + work * tasks
    crowded = max(0.0, busy / cluster.cores - cycle - queue) if cluster.machines == 1 else 0.0
    found = {**own, CORES: crowded, SERVERS: queue}
    memory = held(
        situation,
        situation.local_batch,
        optimizer=0.0,
        exchange=2 * model.gradients,
    )
    server = held(
        situation, 0, parameters=1 / servers, gradients=2 / servers, optimizer=1 / servers
    )
    said = (
        f"a push is about {tasks - 1} updates stale, and is an update of "
        f"{situation.local_batch:.3g} examples: the goal may take more of them",
    )
    sent = max(push.sent * cluster.workers, pull.sent * tasks / servers)
    largest_task = max(memory, server, key=lambda each: sum(each.values()))
    rhythm = Rhythm(group=1, served=served)
    sent /= max(1, tasks)
    return Cost(found, largest_task, sent, situation.batch, said[: tasks > 1], rhythm)


def _served(situation: Situation, work: float, largest: float) -> float:
    """Seconds of a server for a push: of its work, or of its line, in both directions at once."""
    cluster = situation.cluster
    served = work / cluster.ps
    if cluster.link is None or cluster.machines == 1:
        return served
    return max(served, largest / cluster.ps * 8 / cluster.link.rate)


def _apart(strategy: Declared, situation: Situation) -> Cost:
    """Groups that train apart, and push now and then what they have moved."""
    cluster, model = situation.cluster, situation.profile.model
    groups = groups_of(strategy, situation)
    count, every, own = groups.count, groups.every, groups.own
    crosses = cluster.machines > 1
    push = message(situation, model.parameters, crosses)
    moved = push + message(situation, model.parameters, crosses)
    work = 3 * situation.profile.machine.copy * model.parameters
    served = _served(situation, work, model.parameters)
    step = sum(own.values()) + sum(groups.inside.seconds.values())
    cycle = every * step + moved.memory + moved.link
    seconds = {**own, **(groups.inside + moved * (1 / every)).seconds}
    seconds[SERVERS] = queueing(count, cycle, served) / every
    seconds[OTHERS] = waiting(situation, own, groups.members)
    memory = held(situation, situation.local_batch, parameters=2.0, exchange=2 * model.gradients)
    said = (
        f"{count} models drift apart for {every} updates, and what one pushes is about "
        f"{count - 1} pushes of others late: the goal may take more of them",
    )
    sent = groups.inside.sent + push.sent / every
    rhythm = Rhythm(groups.members, every, served)
    return Cost(seconds, memory, sent, situation.batch, said, rhythm)


def queueing(tasks: int, cycle: float, served: float) -> float:
    """Seconds that a push is at the servers, waiting and served, by mean value analysis.

    A push goes to all servers at once, each of which has its part: they are as one queue.

    Args:
        tasks: Workers, each with one push on its way at most.
        cycle: Seconds of a worker from a reply to its next push.
        served: Seconds of a server for a push.

    Returns:
        The seconds.
    """
    waiting, response = 0.0, served
    for number in range(1, tasks + 1):
        response = served * (1 + waiting)
        waiting = number * response / (cycle + response) if cycle + response else 0.0
    return response
