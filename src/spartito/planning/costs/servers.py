"""Asynchronous workers over parameter servers: a closed network of queues.

A worker pulls the values, computes its part of a batch, and pushes gradients. Each server serves
one push after the other, which varies little: workers fall into a row behind one another, and wait
where the servers are busy all the time. Its line is shared by all who send at a time, which exact
mean value analysis gives (Reiser and Lavenberg 1980). Cores that servers and workers use together
limit the rate, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spartito.declared import Declared
from spartito.planning.costs.compute import crowding, disturbed, own_step, waiting
from spartito.planning.costs.exchange import message, on_a_line
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
    turns = crowding(situation) / disturbed(situation)  # who waits for nobody has its part of them
    own = {n: s / turns for n, s in own_step(situation, situation.local_batch).items()}
    update = own.pop(UPDATE)
    crosses = cluster.machines > 1
    push = message(situation, model.gradients, crosses)
    pull = message(situation, model.parameters, crosses)
    moved = push + pull
    work = update + machine.copy * (model.gradients + model.parameters)
    served = work / servers
    occupied = max(served, _on_line(situation, max(model.gradients, model.parameters)))
    own[MEMORY], own[LINK] = moved.memory, moved.link
    cycle = sum(own.values()) * cluster.slowest / cluster.mean_speed
    queue = queueing(tasks, cycle, served)
    lines = [_on_line(situation, nbytes) for nbytes in (model.gradients, model.parameters)]
    queue += sharing(tasks, cycle + queue - sum(lines), lines)
    busy = (sum(own.values()) - moved.link + work) * tasks
    is_one = cluster.machines == 1 or cluster.shared
    crowded = max(0.0, busy / cluster.cores - cycle - queue) if is_one else 0.0
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
    rhythm = Rhythm(group=1, served=served, occupied=occupied)
    sent /= max(1, tasks)
    return Cost(found, largest_task, sent, situation.batch, said[: tasks > 1], rhythm)


def _on_line(situation: Situation, nbytes: float) -> float:
    """Seconds of a server's line for its part of what a worker sends."""
    cluster = situation.cluster
    if cluster.link is None or cluster.machines == 1:
        return 0.0
    return on_a_line(cluster.link, nbytes / cluster.ps)


def _apart(strategy: Declared, situation: Situation) -> Cost:
    """Groups that train apart, and push now and then what they have moved."""
    cluster, model = situation.cluster, situation.profile.model
    groups = groups_of(strategy, situation)
    count, every, own = groups.count, groups.every, groups.own
    crosses = cluster.machines > 1
    push = message(situation, model.parameters, crosses)
    moved = push + message(situation, model.parameters, crosses)
    work = 3 * situation.profile.machine.copy * model.parameters
    served = work / cluster.ps
    occupied = max(served, _on_line(situation, model.parameters))
    step = sum(own.values()) + sum(groups.inside.seconds.values())
    cycle = every * step + moved.memory + moved.link
    seconds = {**own, **(groups.inside + moved * (1 / every)).seconds}
    queue = queueing(count, cycle, served)
    lines = [_on_line(situation, model.parameters)] * 2
    queue += sharing(count, cycle + queue - sum(lines), lines)
    seconds[SERVERS] = queue / every
    seconds[OTHERS] = waiting(situation, own, groups.members)
    memory = held(situation, situation.local_batch, parameters=2.0, exchange=2 * model.gradients)
    said = (
        f"{count} models drift apart for {every} updates, and what one pushes is about "
        f"{count - 1} pushes of others late: the goal may take more of them",
    )
    sent = groups.inside.sent + push.sent / every
    rhythm = Rhythm(groups.members, every, served, occupied)
    return Cost(seconds, memory, sent, situation.batch, said, rhythm)


def queueing(tasks: int, cycle: float, served: float) -> float:
    """Seconds that a push is at the servers, waiting and served, where all take as long.

    A push goes to all servers at once, each of which has its part: they are as one.

    Args:
        tasks: Workers, each with one push on its way at most.
        cycle: Seconds of a worker from a reply to its next push.
        served: Seconds until a server has served a push.

    Returns:
        The seconds.
    """
    return max(served, tasks * served - cycle)


def sharing(tasks: int, between: float, lines: Sequence[float]) -> float:
    """Seconds by which messages take longer because others are on a server's line, too.

    Args:
        tasks: Workers, each with one message on its way at most.
        between: Seconds of a worker in which it has none.
        lines: Seconds of a message alone: on the way in, and on the way out.

    Returns:
        The seconds, of all of its messages.
    """
    others, took = [0.0 for _ in lines], list(lines)
    for number in range(1, tasks + 1):
        took = [line * (1 + before) for line, before in zip(lines, others, strict=True)]
        cycle = between + sum(took)
        others = [number * each / cycle if cycle else 0.0 for each in took]
    return sum(took) - sum(lines)
