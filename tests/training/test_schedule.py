"""When a scheduler is stepped, after a position that it is ahead of, or behind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from spartito.training.fitting.schedule import Schedule


def by(interval: str) -> tuple[Schedule, LambdaLR]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.step()  # else torch warns
    return Schedule(scheduler, interval, None), scheduler


@given(st.integers(-5, 5), st.lists(st.integers(0, 3), max_size=5))
def test_steps_that_it_is_ahead_are_left_out_and_those_it_is_behind_made_up_for(
    ahead: int, updates: list[int]
) -> None:
    schedule, scheduler = by("step")
    schedule.go_on(None, ahead)
    for count in updates:
        schedule.came(1, count, None)
    assert scheduler.last_epoch == max(0, sum(updates) - ahead)


def test_whether_the_end_of_an_epoch_changes_the_rate() -> None:
    assert not Schedule(None, "step", None).end_epoch({"loss": 1.0})
    for interval, changes in (("step", False), ("epoch", True)):
        schedule, scheduler = by(interval)
        schedule.came(1, 3, None)
        before = scheduler.last_epoch
        assert schedule.end_epoch({"loss": 1.0}) == changes
        assert scheduler.last_epoch == before + changes


def test_a_plateau_is_of_what_was_validated() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = Schedule(ReduceLROnPlateau(optimizer, patience=0), "step", None)
    rates = []
    for loss in (1.0, 1.0, 2.0):
        assert schedule.end_epoch({"loss": 0.0, "val_loss": loss})
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1.0, 0.1, 0.01])
