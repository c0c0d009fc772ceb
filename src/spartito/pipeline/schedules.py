"""The order in which each task of a pipeline computes: pure functions of its shape.

Stage ``s`` is computed by task ``s % tasks``: with several stages for each task, a microbatch
passes all tasks several times.

| schedule | idle part of a step at most (backward takes twice the forward pass) |
|---|---|
| `gpipe` (Huang et al. 2019), `1f1b` (Narayanan et al. 2019) | (p - 1) / (m + p - 1) |
| `interleaved` (Narayanan et al. 2021), v stages for each task | (p - 1) / (v m + p - 1) |
| `zero_bubble` (Qi et al. 2023, ZB-H1) | (p - 1) / (3 m + p - 1) |

with p tasks and m microbatches, m a multiple of p where interleaved, m >= p for `zero_bubble`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spartito.errors import UserError
from spartito.names import nearest

FORWARD, BACKWARD, INPUTS, WEIGHTS = "forward", "backward", "inputs", "weights"
"""What is computed: `BACKWARD` is `INPUTS` (gradients of the inputs) and `WEIGHTS` together."""

COSTS: Mapping[str, float] = {FORWARD: 1, BACKWARD: 2, INPUTS: 1, WEIGHTS: 1}
"""How long each takes, in forward passes of a stage."""


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of a step.

    Args:
        kind: "forward", "backward", or its halves "inputs" and "weights".
        stage: The stage of the model, from 0.
        microbatch: The part of the batch, from 0.
    """

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What a schedule is for.

    Args:
        tasks: The processes of a pipeline.
        per_task: The stages that each of them has.
        microbatches: The parts of a batch.
    """

    tasks: int
    per_task: int
    microbatches: int

    @property
    def stages(self) -> int:
        """All stages of the model."""
        return self.tasks * self.per_task


@dataclass(frozen=True, slots=True)
class Span:
    """When an action ran.

    Args:
        action: What was computed.
        start: When it began, as a number.
        end: When it was done.
    """

    action: Action
    start: float
    end: float


Order = tuple[Action, ...]
"""What a task computes, in order."""
Schedule = Callable[[Shape, int], Order]
"""What the task with this number computes in such a pipeline, as `gpipe` and the others say."""


def gpipe(shape: Shape, task: int) -> Order:
    """All forward passes, then all backward passes."""
    return _one_by_one(shape, task, ahead=shape.microbatches)


def one_forward_one_backward(shape: Shape, task: int) -> Order:
    """A backward pass as soon as there is one: few activations wait, as many as later stages."""
    return _one_by_one(shape, task, ahead=shape.tasks - 1 - task)


def interleaved(shape: Shape, task: int) -> Order:
    """As 1F1B with several stages for each task, which fill each other's gaps.

    Microbatches go in rounds of as many as there are tasks, one stage after the other. A last
    round that is smaller leaves gaps where a whole one has microbatches.
    """
    if shape.per_task == 1:
        return one_forward_one_backward(shape, task)
    tasks, stages = shape.tasks, range(task, shape.stages, shape.tasks)
    rounds = [range(first, first + tasks) for first in range(0, shape.microbatches, tasks)]
    forwards = [Action(FORWARD, s, m) for part in rounds for s in stages for m in part]
    backwards = [Action(BACKWARD, s, m) for part in rounds for s in stages[::-1] for m in part]
    ahead = (shape.per_task - 1) * tasks + 2 * (tasks - 1 - task)
    order = _alternating(forwards, backwards, ahead)
    return tuple(action for action in order if action.microbatch < shape.microbatches)


def zero_bubble(shape: Shape, task: int) -> Order:
    """As 1F1B, and gradients of weights, for which nobody waits, fill its gaps.

    Task ``i`` puts off those of ``i`` microbatches, so that each keeps as many activations. The
    first one, for whose gradients nobody waits, has whole backward passes.
    """
    if task == 0:
        return one_forward_one_backward(shape, task)
    order: list[Action] = []
    for action in one_forward_one_backward(shape, task):
        if action.kind == FORWARD:
            order.append(action)
            continue
        order.append(Action(INPUTS, task, action.microbatch))
        if action.microbatch >= task:
            order.append(Action(WEIGHTS, task, action.microbatch - task))
    late = range(max(0, shape.microbatches - task), shape.microbatches)
    return (*order, *(Action(WEIGHTS, task, m) for m in late))


INTERLEAVED = "interleaved"
"""The schedule that has several stages for each task: 2, or what follows a colon."""

SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    INTERLEAVED: interleaved,
    "zero_bubble": zero_bubble,
}
"""All schedules by name."""


def orders(name: str, shape: Shape) -> tuple[Order, ...]:
    """What each task of a pipeline computes.

    Args:
        name: One of `SCHEDULES`.
        shape: The pipeline.

    Returns:
        The order of each task.

    Raises:
        UserError: An unknown schedule, or several stages for each task in one for a single one.
    """
    parse(name)
    if shape.per_task > 1 and name != INTERLEAVED:
        raise UserError(
            f"{shape.per_task} stages for each task with schedule={name!r}",
            "Take schedule='interleaved', or as many tasks as stages.",
        )
    return tuple(SCHEDULES[name](shape, task) for task in range(shape.tasks))


def parse(text: str) -> tuple[str, int]:
    """What was asked for.

    Args:
        text: As "1f1b", "interleaved" or "interleaved:3".

    Returns:
        The name of the schedule, and the stages of each task.

    Raises:
        UserError: There is no such schedule.
    """
    name, colon, each = text.partition(":")
    if name not in SCHEDULES:
        raise UserError(f"unknown schedule {text!r}", nearest(name, SCHEDULES))
    if colon and name != INTERLEAVED:
        raise UserError(
            f"schedule={text!r}: {name} has one stage for each task",
            "Take 'interleaved:2' for several, or as many tasks as stages.",
        )
    if colon and not (each.isdecimal() and int(each) > 0):
        raise UserError(f"schedule={text!r}", "A number of stages follows: 'interleaved:3'.")
    return name, int(each) if colon else 2 if name == INTERLEAVED else 1


def passing(shape: Shape, task: int) -> Order:
    """The forward passes alone, for evaluation."""
    stages = range(task, shape.stages, shape.tasks)
    return tuple(Action(FORWARD, s, m) for s in stages for m in range(shape.microbatches))


def bubble(name: str, shape: Shape) -> float:
    """The part of a step that a task is idle for, by the schedule's own bound.

    Args:
        name: The schedule.
        shape: The pipeline.

    Returns:
        From 0 to 1, where a backward pass takes twice the forward pass and messages no time.
    """
    tasks, count = shape.tasks, shape.microbatches
    if name == "zero_bubble":
        gaps = tasks - 1 + max(0, tasks - count)
        return gaps / (3 * count + gaps)
    rounded = -(-count // tasks) * tasks if shape.per_task > 1 else count
    return 1 - shape.per_task * count / (shape.per_task * rounded + tasks - 1)


def simulate(
    orders: Sequence[Order], cost: Callable[[Action], float] = lambda action: COSTS[action.kind]
) -> tuple[tuple[Span, ...], ...]:
    """When each action would run, if each task begins the next one as soon as it can.

    Args:
        orders: What each task computes.
        cost: How long each action takes.

    Returns:
        The spans of each task.

    Raises:
        ValueError: The tasks wait for each other without end.
    """
    last = max(action.stage for order in orders for action in order)
    halved = {action.stage for order in orders for action in order if action.kind == INPUTS}
    done: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for order, own in zip(orders, spans, strict=True):
            while len(own) < len(order):
                action = order[len(own)]
                needs = [done.get(need, -1.0) for need in needed(action, last, halved)]
                if -1.0 in needs:
                    break
                start = max([own[-1].end if own else 0.0, *needs])
                done[action] = start + cost(action)
                own.append(Span(action, start, done[action]))
                moved = True
    if any(len(own) < len(order) for order, own in zip(orders, spans, strict=True)):
        stuck = [
            order[len(own)] for order, own in zip(orders, spans, strict=True) if order[len(own) :]
        ]
        raise ValueError(f"tasks wait for each other: {stuck}")
    return tuple(map(tuple, spans))


def needed(action: Action, last: int, halved: Collection[int]) -> Iterator[Action]:
    """What must be done before ``action``.

    Args:
        action: An action.
        last: The last stage.
        halved: The stages whose backward passes are in halves.

    Yields:
        The actions that it waits for.
    """
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind == FORWARD:
        if stage:
            yield Action(FORWARD, stage - 1, microbatch)
    elif kind == WEIGHTS:
        yield Action(INPUTS, stage, microbatch)
    else:
        yield Action(FORWARD, stage, microbatch)
        if stage < last:
            yield Action(INPUTS if stage + 1 in halved else BACKWARD, stage + 1, microbatch)


def _one_by_one(shape: Shape, task: int, ahead: int) -> Order:
    microbatches = range(shape.microbatches)
    forwards = [Action(FORWARD, task, m) for m in microbatches]
    return _alternating(forwards, [Action(BACKWARD, task, m) for m in microbatches], ahead)


def _alternating(forwards: list[Action], backwards: list[Action], ahead: int) -> Order:
    """``ahead`` forwards, then a forward and a backward in turn, then the rest."""
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    order = [*forwards[:ahead], *(action for pair in pairs for action in pair)]
    return (*order, *backwards[len(forwards) - ahead :])
