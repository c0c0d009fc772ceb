"""Layers divided among tasks: the schedule that a job would follow is run, with measured times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spartito.declared import Declared
from spartito.errors import UserError
from spartito.pipeline.schedules import FORWARD, Action, Shape, orders, parse, simulate
from spartito.planning.costs.compute import crowding, passes, turns, waiting
from spartito.planning.costs.exchange import between_models, machines_of, message
from spartito.planning.costs.memory import held
from spartito.planning.costs.parts import (
    COMPUTE,
    INPUT,
    LINK,
    MEMORY,
    OTHERS,
    STAGES,
    UPDATE,
    Cost,
    Rhythm,
    Situation,
    check_options,
    tasks_of_model,
    whole_number,
)
from spartito.planning.profile import Part

OPTIONS: tuple[str, ...] = ("stages", "microbatches", "schedule")
MICROBATCHES = 8
"""As `PipelineStrategy` has it."""
MOST_STAGES = 64
"""Longer pipelines are named by the user."""


def candidates(situation: Situation) -> Iterable[Mapping[str, Any]]:
    """As `Costs.candidates`: lengths that divide the tasks, and more microbatches."""
    tasks = situation.cluster.tasks
    sizes = [n for n in (2, 4, 8, 16, 32, MOST_STAGES) if tasks % n == 0]
    for stages in [n for n in sizes if n <= len(situation.profile.parts)] or [tasks]:
        for microbatches in (MICROBATCHES, 4 * stages):
            yield {"stages": stages, "microbatches": microbatches}


def cost(strategy: Declared, situation: Situation) -> Cost:
    """As `Costs.cost`."""
    check_options(strategy, OPTIONS)
    cluster, profile = situation.cluster, situation.profile
    stages = tasks_of_model(strategy, "stages", cluster.tasks)
    schedule, per_task = parse(str(strategy.options.get("schedule", "1f1b")))
    if per_task > 1:
        raise UserError(
            f"schedule={schedule} has several stages for each task",
            "A plan knows gpipe, 1f1b and zero_bubble.",
        )
    if profile.uncut:
        raise UserError(profile.uncut, "Take a strategy that keeps the model whole.")
    if stages > len(profile.parts):
        raise UserError(
            f"stages={stages}: {profile.model.name} has {len(profile.parts)} parts in a row",
            "Take fewer stages, or a model with more layers in a list.",
        )
    lines = cluster.tasks // stages
    examples = situation.batch / lines
    count = min(whole_number(strategy, "microbatches", MICROBATCHES), max(1, int(examples)))
    cut = balanced(profile.parts, stages)
    weights = fractions([sum(part.seconds for part in stage) for stage in cut])
    sizes = fractions([float(sum(part.parameters for part in stage)) for stage in cut])
    crosses = machines_of(situation, stages) > 1
    micro = examples / count
    sends = [message(situation, stage[-1].output * micro, crosses) for stage in cut[:-1]]
    # A stage waits for others: of the cores it has its turns, and no crowd that meets.
    ratio = turns(situation) / crowding(situation)
    forward = ratio * (passes(situation, "forward", micro) + passes(situation, "other", micro))
    backward = ratio * passes(situation, "backward", micro)
    passing = max(0.0, profile.slowdown(stages) - 1) * (forward + backward) / stages
    adding = profile.adding / cluster.slowest * (count > 1)
    taking = max(1.0, turns(situation))

    def seconds(action: Action) -> float:
        own = forward if action.kind == FORWARD else backward
        own *= weights[action.stage] * (1.0 if action.kind in (FORWARD, "backward") else 0.5)
        own += passing * (action.kind == FORWARD)
        own += adding * sizes[action.stage] * (action.kind in ("backward", "weights"))
        edge = action.stage if action.kind == FORWARD else action.stage - 1
        if 0 <= edge < len(sends) and action.kind != "weights":
            own += (sends[edge].memory + sends[edge].link) * taking
        return own

    spans = simulate(orders(schedule, Shape(stages, 1, count)), seconds)
    whole = max(span.end for own in spans for span in own)
    compute = ((forward + backward) * max(weights) + passing) * count + adding * count * max(sizes)
    moved = 2 * count * max([send.memory + send.link for send in sends], default=0.0)
    where = LINK if crosses else MEMORY
    own = {INPUT: passes(situation, "input", examples), COMPUTE: compute}
    own[UPDATE] = passes(situation, "update", examples) * max(sizes)
    gaps = {where: min(moved, whole - compute), STAGES: max(0.0, whole - compute - moved)}
    gradients = profile.model.gradients * max(sizes)
    summed = between_models(situation, gradients, stages)
    found = {**own, **gaps}
    for name, value in summed.seconds.items():
        found[name] = found.get(name, 0.0) + value
    found[OTHERS] = waiting(situation, own, cluster.tasks)
    sent = summed.sent + 2 * count * max([send.sent for send in sends], default=0.0)
    memory = held(
        situation,
        examples,
        parameters=max(sizes),
        gradients=max(sizes),
        optimizer=max(sizes),
        activations=max(weights) * min(1.0, stages / count),
        exchange=gradients if lines > 1 else 0.0,
    )
    return Cost(found, memory, sent, situation.batch, rhythm=Rhythm(replicas=lines))


def balanced(parts: Sequence[Part], stages: int) -> list[Sequence[Part]]:
    """Cut a row of parts so that the slowest stage is as quick as can be.

    Args:
        parts: In their order.
        stages: As many as there are parts, or fewer.

    Returns:
        The parts of each stage, one or more.
    """
    times = [max(part.seconds, 1e-12) for part in parts]
    low, high = max(times), sum(times)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(times, middle)) <= stages else (middle, high)
    ends = _filled(times, high)
    while len(ends) < stages:  # one that has several parts gives one away
        starts = [0, *ends[:-1]]
        longest = max(range(len(ends)), key=lambda i: ends[i] - starts[i])
        ends.insert(longest, starts[longest] + (ends[longest] - starts[longest]) // 2)
    return [parts[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _filled(times: Sequence[float], limit: float) -> list[int]:
    """Where stages end that take ``limit`` seconds at most, each as long as it can be."""
    ends, now = [], 0.0
    for index, value in enumerate(times):
        if now + value > limit * (1 + 1e-9) and index:
            ends.append(index)
            now = 0.0
        now += value
    return [*ends, len(times)]


def fractions(values: Sequence[float]) -> list[float]:
    """Each as a part of their sum."""
    whole = sum(values) or 1.0
    return [value / whole for value in values]
