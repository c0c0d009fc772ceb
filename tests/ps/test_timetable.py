"""The chief foresees what a schedule will do, and leaves the optimizer as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as lr

from spartito.ps.protocol.options import set_options, settings
from spartito.ps.protocol.timetable import Row, Timetable
from spartito.ps.scheduler.planner import AHEAD, BEGIN, BEHIND, Planner

STEPS = 3 * AHEAD // 2
Make = Callable[[Optimizer], Any]


def warmed_up(optimizer: Optimizer) -> lr.SequentialLR:
    warm, cold = lr.LinearLR(optimizer, 0.1, 1.0, 50), lr.CosineAnnealingLR(optimizer, STEPS - 50)
    return lr.SequentialLR(optimizer, [warm, cold], [50])


SCHEDULES: dict[str, Make] = {
    "step": lambda o: lr.StepLR(o, 100, 0.5),
    "exponential": lambda o: lr.ExponentialLR(o, 0.99),
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.1, total_steps=STEPS),
    "cyclic": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=70, cycle_momentum=False),
    "sequence": warmed_up,
}


def groups(kind: type[Optimizer]) -> Optimizer:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    made: Any = kind
    given = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.02}]
    optimizer: Optimizer = made(given, lr=0.05)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("late", [0, 5])
def test_a_server_that_hears_seldom_has_the_options_of_every_step(name: str, late: int) -> None:
    """The chief comes by only where it sees ``late`` steps at once; the server never waits."""
    optimizer = groups(AdamW)
    schedule = SCHEDULES[name](optimizer)
    planner = Planner(optimizer)
    planner.schedule = schedule
    served, told, table = settings(optimizer), 0, Timetable()
    for step in range(STEPS):
        if step % (late + 1) == 0:
            before = (settings(optimizer), schedule.state_dict()["last_epoch"])
            found = planner.write(step)
            assert before == (settings(optimizer), schedule.state_dict()["last_epoch"])
            told += found is not None
            table = found or table
        row = table.at(step)
        if row is not None:
            set_options(served, row)
        for group, own in zip(served, settings(optimizer), strict=True):
            assert group == {name: own[name] for name in group}
        if step < STEPS - 1:
            schedule.step()
    assert 2 <= told <= 2 * STEPS / AHEAD + 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_chief_that_is_busy_leaves_no_step_without_its_options(name: str) -> None:
    """It evaluates from the first step on, while its watch looks at the servers now and then."""
    optimizer, steps = groups(AdamW), groups(AdamW)
    planner = Planner(optimizer)
    planner.schedule = schedule = SCHEDULES[name](optimizer)
    truth, served = SCHEDULES[name](steps), settings(steps)
    table = planner.write(0)
    for step in range(STEPS):
        if step % 200 == 0:
            table = planner.extend(step) or table
        assert table is not None
        assert table.first <= max(0, step - BEHIND)  # another server may be behind
        set_options(served, table.at(step) or [])
        assert served == [
            {name: own[name] for name in group}
            for group, own in zip(served, settings(steps), strict=True)
        ]
        if step < STEPS - 1:
            truth.step()
    for _ in range(STEPS - 1):
        schedule.step()
    assert planner.write(STEPS - 1) is None  # what the servers know is right


def test_counters_of_the_optimizer_are_never_told() -> None:
    optimizer = groups(SGD)
    for group in optimizer.param_groups:
        group["k"] = 0
    planner = Planner(optimizer)
    assert planner.write(0) is None
    schedule = lr.StepLR(optimizer, 2, 0.1)
    planner.schedule = schedule
    rows = [row for step in range(3) for row in (planner.write(step) or Timetable()).rows]
    assert rows
    assert all("k" not in group for row in rows for group in row)
    served: Row = [{"lr": 7.0, "k": 5, "momentum": 0.0} for _ in range(2)]
    assert planner.counters(served) == [{"k": 5, "momentum": 0.0}] * 2


def test_what_a_callback_changes_is_told_at_once_and_once() -> None:
    optimizer = groups(SGD)
    planner = Planner(optimizer)
    assert planner.write(3) is None
    optimizer.param_groups[1]["lr"] = 0.5
    assert planner.write(4) == Timetable(4, [[{}, {"lr": 0.5}]])
    assert planner.write(5) is None
    optimizer.param_groups[1]["lr"] = 0.02
    assert planner.write(6) == Timetable(6, [[{}, {"lr": 0.02}]])


class Unique(lr.LambdaLR):
    """Cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("there is only one")


def test_another_schedule_is_told_as_far_as_the_first_and_a_surprise_less_far() -> None:
    optimizer = groups(SGD)
    planner = Planner(optimizer)
    for step in (0, 10):  # as each call of `fit` may bring its own
        planner.schedule = lr.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        found = planner.write(step)
        assert found is not None
        assert len(found.rows) == 1 + AHEAD
    optimizer.param_groups[0]["lr"] = 0.7
    found = planner.write(11)
    assert found is not None
    assert len(found.rows) == 1 + BEGIN


def test_a_schedule_that_cannot_be_copied_is_told_step_by_step() -> None:
    optimizer = groups(SGD)
    planner = Planner(optimizer)
    planner.schedule = schedule = Unique(optimizer, lambda step: 1.0 if step < 3 else 0.5)
    told = []
    for step in range(6):
        told.append(planner.write(step))
        schedule.step()
    assert told[4:] == [None, None]
    assert told[3] is not None
    assert [group["lr"] for group in told[3].rows[0]] == [0.025, 0.01]


def test_before_and_after_the_rows() -> None:
    assert Timetable().at(3) is None
    table = Timetable(5, [[{"lr": 1.0}], [{"lr": 2.0}]])
    assert [table.at(step) for step in (0, 5, 6, 99)] == [
        [{"lr": 1.0}], [{"lr": 1.0}], [{"lr": 2.0}], [{"lr": 2.0}]
    ]  # fmt: skip
