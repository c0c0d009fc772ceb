from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.chaos.schedule import KINDS, Fault, drawn, matched, parse_schedules, written
from spartito.errors import UserError

TASKS = ["worker:0", "worker:13", "chief:0", "ps:1", "evaluator:0", "launcher"]
FAULTS = st.sampled_from(matched(KINDS, TASKS)).flatmap(
    lambda pair: st.integers(0, 10**9).map(lambda step: Fault(*pair, step))
)
SCHEDULES = st.lists(FAULTS, min_size=1, max_size=4).map(tuple)


@given(st.lists(SCHEDULES, min_size=1, max_size=5), st.sampled_from([",", "\n", " ,\n\n", ";x\n"]))
def test_what_is_written_is_read_again(runs: list[tuple[Fault, ...]], between: str) -> None:
    assert parse_schedules(between.join(map(written, runs)) + " ; a remark, kill@") == runs


@given(st.integers(), st.integers(1, 20), st.integers(1, 20))
def test_a_round_does_not_depend_on_how_many_there_are(seed: int, few: int, many: int) -> None:
    few, many = sorted((few, many))
    kinds, steps = list(KINDS), range(5, 50)
    runs = drawn(seed, many, kinds, TASKS, steps)
    assert drawn(seed, few, kinds, TASKS, steps) == runs[:few]
    assert all(fault.step in steps for run in runs for fault in run)


def test_every_fault_is_drawn_at_some_time() -> None:
    runs = drawn(0, 2000, list(KINDS), TASKS, range(3))
    assert {(run[0].kind, run[0].task) for run in runs} == set(matched(KINDS, TASKS))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a schedule without faults"),
        ("; kill@worker:1#4", "a schedule without faults"),
        ("kill@worker:1", "is not a fault"),
        ("kill@worker#4", "is not a fault"),
        ("kill@worker:1#-4", "is not a fault"),
        ("kil@worker:1#4", "Did you mean 'kill'"),
        ("nan@ps:0#4", "nan cannot happen to ps:0"),
        ("kill@worker:1#4+", "is not a fault"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse_schedules(text)


def test_faults_that_can_happen_to_nobody_are_refused() -> None:
    with pytest.raises(UserError, match="none of nan, spin can happen to launcher"):
        drawn(0, 1, ["nan", "spin"], ["launcher"], range(3))
    with pytest.raises(UserError, match="'spun' is not a fault"):
        matched(["spun"], [])
