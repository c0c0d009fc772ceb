from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.errors import UserError
from spartito.launch.processes.throttle import fractions_of, slow_tasks

NAMES = ["worker 0", "worker 1", "ps 0"]


def test_what_the_user_types_is_a_fraction_per_task() -> None:
    assert slow_tasks(["worker:1=0.25", "ps:0=1"]) == {"worker:1": 0.25, "ps:0": 1.0}
    assert slow_tasks([]) == {}


@given(st.dictionaries(st.from_regex(r"[a-z]+:\d", fullmatch=True), st.floats(0.001, 1)))
def test_every_fraction_comes_through(fractions: dict[str, float]) -> None:
    assert slow_tasks([f"{task}={fraction!r}" for task, fraction in fractions.items()]) == fractions


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["worker:1"], ["'worker:1'", "worker:1=0.25"]),
        (["=0.5"], ["'=0.5'"]),
        (["worker:1=fast"], ["'fast'", "not a number"]),
        (["worker:1=0"], ["fraction 0", "above 0"]),
        (["worker:1=1.5"], ["fraction 1.5", "at most 1"]),
        (["worker:1=-1"], ["fraction -1"]),
        (["worker:1=nan"], ["fraction nan"]),
        (["worker:1=0.5", "worker:1=0.7"], ["worker:1 twice"]),
    ],
)
def test_each_mistake_is_named(texts: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        slow_tasks(texts)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_tasks_that_nobody_slows_down_run_all_the_time() -> None:
    assert fractions_of(NAMES, {"worker:1": 0.25}) == [1.0, 0.25, 1.0]


def test_an_unknown_task_gets_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'worker:7' .*\n.*Known: ps:0, worker:0, worker:1"):
        fractions_of(NAMES, {"worker:7": 0.5})
