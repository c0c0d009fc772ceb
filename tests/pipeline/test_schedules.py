"""Schedules of pipelines, as pure functions of their shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from spartito.errors import UserError
from spartito.pipeline import split
from spartito.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    INPUTS,
    SCHEDULES,
    WEIGHTS,
    Action,
    Shape,
    Span,
    bubble,
    orders,
    passing,
    simulate,
)

shapes = st.builds(Shape, st.integers(1, 8), st.integers(1, 4), st.integers(1, 24))
names = st.sampled_from(list(SCHEDULES))


def allowed(name: str, shape: Shape) -> Shape:
    return shape if name == "interleaved" else Shape(shape.tasks, 1, shape.microbatches)


@given(names, shapes)
def test_each_microbatch_passes_each_stage_once(name: str, shape: Shape) -> None:
    shape = allowed(name, shape)
    found = orders(name, shape)
    for task, order in enumerate(found):
        halves = name == "zero_bubble" and task > 0
        kinds = [FORWARD, INPUTS, WEIGHTS] if halves else [FORWARD, BACKWARD]
        stages = range(task, shape.stages, shape.tasks)
        every = {Action(k, s, m) for k in kinds for s in stages for m in range(shape.microbatches)}
        assert len(order) == len(every)
        assert set(order) == every
        for kind in kinds:  # sums of gradients and running statistics are those of one task
            for stage in stages:
                own = [a.microbatch for a in order if (a.kind, a.stage) == (kind, stage)]
                assert own == sorted(own)


def idle(spans: Sequence[Sequence[Span]]) -> float:
    """The part of a step in which a task computed nothing, the mean over the tasks."""
    every = [span for own in spans for span in own]
    whole = max(span.end for span in every) - min(span.start for span in every)
    return 1 - sum(span.end - span.start for span in every) / len(spans) / whole


@given(names, shapes)
def test_no_task_waits_without_end_and_the_bubble_has_its_bound(name: str, shape: Shape) -> None:
    shape = allowed(name, shape)
    assert idle(simulate(orders(name, shape))) <= bubble(name, shape) + 1e-9
    assert simulate([passing(shape, task) for task in range(shape.tasks)])


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 4))
def test_bounds_are_reached(tasks: int, per_task: int, rounds: int) -> None:
    for name in SCHEDULES:
        shape = allowed(name, Shape(tasks, per_task, tasks * rounds))
        assert idle(simulate(orders(name, shape))) == pytest.approx(bubble(name, shape))


def test_bounds_are_those_of_the_papers() -> None:
    assert bubble("1f1b", Shape(2, 1, 8)) == pytest.approx(1 / 9)
    assert bubble("gpipe", Shape(4, 1, 8)) == pytest.approx(3 / 11)
    assert bubble("interleaved", Shape(4, 2, 8)) == pytest.approx(3 / 19)
    assert bubble("zero_bubble", Shape(4, 1, 8)) == pytest.approx(3 / 27)


@given(shapes)
def test_activations_wait_for_no_more_microbatches_than_tasks(shape: Shape) -> None:
    for name in ("1f1b", "zero_bubble"):
        for order in orders(name, allowed(name, shape)):
            waiting = [(a.kind == FORWARD) - (a.kind in (BACKWARD, WEIGHTS)) for a in order]
            most = max(sum(waiting[: n + 1]) for n in range(len(waiting)))
            assert most <= shape.tasks


def test_tasks_that_wait_for_each_other_are_noticed() -> None:
    forward, backward = Action(FORWARD, 0, 0), Action(BACKWARD, 0, 0)
    others = (Action(FORWARD, 1, 0), Action(BACKWARD, 1, 0))
    assert simulate([(forward, backward), others])
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([(backward, forward), others])


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=r"unknown schedule '1f1'"):
        orders("1f1", Shape(2, 1, 8))
    with pytest.raises(UserError, match="2 stages for each task with schedule='gpipe'"):
        orders("gpipe", Shape(2, 2, 8))


def test_stages_begin_with_whole_blocks_where_that_costs_little() -> None:
    costs, depths = [1.0, 3.0] * 4, [2, 1, 2, 1, 2, 1, 2]  # four blocks of two parts
    for head, cuts in ((0.5, [4]), (2.0, [5])):  # 8.5 against 8.5, and 10 against 9
        whole = [*costs, head]
        found = split.outermost(whole, [0.0] * 9, [True] * 9, 2, [*depths, 1])
        assert found == cuts
    assert split.outermost(costs, [0.0] * 8, [True] * 8, 8, depths) == [*range(1, 8)]


parts = st.tuples(st.floats(0.1, 4), st.floats(0, 1), st.booleans(), st.integers(0, 3))


@given(st.lists(parts, min_size=2, max_size=10), st.integers(2, 4))
def test_the_slowest_stage_is_little_slower_than_it_must_be(
    found: list[tuple[float, float, bool, int]], stages: int
) -> None:
    costs, moves, owned, depths = map(list, zip(*found, strict=True))
    assume(sum(owned) >= stages)

    def slowest(cuts: Sequence[int]) -> Any:
        spans = list(zip([0, *cuts], [*cuts, len(costs)], strict=True))
        assert len(spans) == stages
        assert all(any(owned[begin:end]) for begin, end in spans)
        ends = [0.0, *(moves[cut] for cut in cuts), 0.0]
        return max(
            sum(costs[begin:end]) + ends[stage] + ends[stage + 1]
            for stage, (begin, end) in enumerate(spans)
        )

    best = slowest(split.partition(costs, moves, owned, stages))
    cuts = split.outermost(costs, moves, owned, stages, depths[1:])
    assert slowest(cuts) <= split.LITTLE * best * (1 + 1e-9)
    assert sorted(set(cuts)) == cuts
