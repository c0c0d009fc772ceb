"""Schedules of pipelines, as pure functions of their shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.errors import UserError
from spartito.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    INPUTS,
    SCHEDULES,
    WEIGHTS,
    Action,
    Shape,
    bubble,
    idle,
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
    kinds = [FORWARD, INPUTS, WEIGHTS] if name == "zero_bubble" else [FORWARD, BACKWARD]
    found = orders(name, shape)
    for task, order in enumerate(found):
        stages = range(task, shape.stages, shape.tasks)
        every = {Action(k, s, m) for k in kinds for s in stages for m in range(shape.microbatches)}
        assert len(order) == len(every)
        assert set(order) == every
        for kind in kinds:  # sums of gradients and running statistics are those of one task
            for stage in stages:
                own = [a.microbatch for a in order if (a.kind, a.stage) == (kind, stage)]
                assert own == sorted(own)


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
    for name, last in (("1f1b", BACKWARD), ("zero_bubble", WEIGHTS)):
        for order in orders(name, allowed(name, shape)):
            waiting = [(a.kind == FORWARD) - (a.kind == last) for a in order]
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
