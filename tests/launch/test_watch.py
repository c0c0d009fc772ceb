from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.cluster.limits import NOTICE, notice_limit
from spartito.cluster.recovery import Recovery
from spartito.heartbeat import PHASES, Beat, Life
from spartito.launch.processes.launcher import Processes
from spartito.launch.processes.process import Running
from spartito.launch.processes.roles import Roles
from spartito.launch.processes.watch import Notice, Seen, Watch, missed, stragglers

HERE = Beat(7, 7, "step", 0, 0.0, 0.0, 0.0, 4711, 37)
RUNS, STOPPED = Life("R", 1.0), Life("T", 1.0)


def watched(looks: Sequence[Sequence[Seen]], watch: Watch) -> list[tuple[float, Notice]]:
    """What is said at which time, where the tasks are looked at as often as they should be."""
    said = []
    for number, seen in enumerate(looks):
        now = number * watch.every
        said += [(now, notice) for notice in watch.look(now, seen)]
    return said


def moving(name: str, now: float, step: float, computed: float = 1.0) -> Seen:
    """A task that makes a step each ``step`` seconds, ``computed`` of that itself."""
    steps = int(now / step)
    beat = replace(HERE, step=steps, steps=steps, time=steps * step, computed=now * computed)
    return Seen(name, beat=beat, life=Life("S", now))


@given(st.sampled_from("Tt"), st.floats(0.5, 600.0), st.integers(0, 50))
def test_a_task_that_is_stopped_is_named_once_and_in_time(
    state: str, limit: float, before: int
) -> None:
    watch = Watch(limit)
    looks = [[Seen("worker 1", beat=replace(HERE, time=n * watch.every), life=Life("R", n))]
             for n in range(before)]  # fmt: skip
    still = Seen("worker 1", beat=HERE, life=Life(state, float(before)))
    (when, notice), *rest = watched([*looks, *[[still]] * 100], watch)
    assert notice.text.startswith(still.life.stands if still.life else "")
    assert when - before * watch.every <= limit - watch.every
    assert not rest


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_a_throttled_task_is_never_called_stopped(stopped: list[bool]) -> None:
    watch = Watch()
    looks = [
        [Seen("worker 0", life=Life("T" if still else "R", float(number)))]
        for number, still in enumerate(stopped)  # it has computed between each two looks
    ]
    assert watched(looks, watch) == []


@given(st.floats(0.001, 20.0), st.sampled_from(PHASES))
def test_a_task_is_not_said_to_stand_within_ten_of_its_steps(step: float, phase: str) -> None:
    watch = Watch()
    count = int(3 * step / watch.every) + 20
    looks = [[moving("worker 0", number * watch.every, step)] for number in range(count)]
    assert watched(looks, watch) == []
    last = looks[-1][0]
    assert last.beat is not None
    last = replace(last, beat=replace(last.beat, phase=phase))
    silent = [[last]] * int(max(NOTICE, 9 * step) / watch.every)
    for number, seen in enumerate(silent[:-2], count):
        assert watch.look(number * watch.every, seen) == []


def test_a_first_step_and_an_evaluation_may_take_long_and_waits_are_not_blamed() -> None:
    for phase, most in (("step", 60), ("evaluate", 60), ("exchange", 1e9), ("connect", 1e9)):
        watch = Watch()
        seen = [Seen("worker 0", beat=replace(HERE, phase=phase), life=RUNS)]
        said = [when for when, _ in watched([seen] * 300, watch)]
        assert said == ([] if most > 150 else [60.0])


def test_a_task_that_does_not_move_is_named_with_its_step_and_goes_on() -> None:
    watch = Watch()
    looks = [[moving("worker 1", number * watch.every, 0.1)] for number in range(20)]
    stuck = looks[-1]
    again = moving("worker 1", 100.0, 0.1)
    said = watched([*looks, *[stuck] * 40, [again]], watch)
    assert [notice.text for _, notice in said] == [
        "has not moved for 5 s (at step 95, in 'step'; a step takes 0.1 s otherwise)",
        "goes on (at step 1000, in 'step')",
    ]
    assert said[0][1].stacks


def test_a_straggler_is_named_after_two_windows_and_again_after_twenty() -> None:
    watch = Watch()
    looks = []
    for number in range(60 * 10):
        now = number * watch.every
        looks.append([
            moving("worker 0", now, 0.1, 0.2), moving("worker 1", now, 0.1, 0.9),
            moving("worker 2", now, 0.1, 0.2),
        ])  # fmt: skip
    said = watched(looks, watch)
    assert [notice.name for _, notice in said] == ["worker 1", "worker 1"]
    assert [when for when, _ in said] == [20.0, 200.0]


@given(st.dictionaries(st.text(), st.floats(0.0, 100.0)))
def test_stragglers_are_slower_than_most_and_fewer_than_half(own: dict[str, float]) -> None:
    found = stragglers(own)
    assert len(found) <= len(own) / 2
    for name, others in found.items():
        assert own[name] > 2 * others
        assert sum(value < own[name] for value in own.values()) >= len(own) / 2


def test_only_who_is_awaited_and_never_met_the_others_is_missed() -> None:
    waits = Seen("worker 0", beat=replace(HERE, phase="connect"), life=RUNS)
    gone = Seen("worker 1", code=0)
    assert [(notice.name, notice.ends) for notice in missed(3.0, [waits, gone])] == [
        ("worker 1", True)
    ]
    trains = replace(waits, beat=HERE)
    for other in (
        replace(gone, vital=False),  # the others begin without it
        replace(gone, code=1),  # that is a failure of its own
        replace(gone, beat=HERE),  # it has trained
    ):
        assert missed(3.0, [waits, other]) == []
    assert missed(3.0, [trains, gone]) == missed(1.0, [waits, gone]) == []


def test_after_the_launcher_stood_still_itself_nobody_is_blamed() -> None:
    watch = Watch()
    seen = [Seen("worker 0", beat=HERE, life=STOPPED)]
    assert watch.look(0.0, seen) == watch.look(100.0, seen) == watch.look(100.5, seen) == []


def lost(seen: Sequence[Seen], seconds: float, watch: Watch | None = None) -> list[str]:
    """Who is ended, where all stand as they are ``seen`` for so many seconds."""
    watch = watch or Watch()
    said = watched([seen] * int(seconds / watch.every), watch)
    return sorted({notice.name for _, notice in said if notice.is_lost})


def test_a_stopped_task_is_ended_only_where_others_wait_for_it_and_can_go_on() -> None:
    stopped = Seen("worker 1", beat=HERE, life=STOPPED, gives_up=300.0)
    for phase in ("exchange", "connect", "recover"):
        waits = Seen("worker 0", beat=replace(HERE, phase=phase), life=RUNS, gives_up=300.0)
        assert lost([waits, stopped], 20) == ["worker 1"]
        assert lost([waits, stopped], 4) == []
        assert lost([waits, replace(stopped, gives_up=None)], 20) == []
        assert lost([waits, replace(stopped, life=Life("t", 1.0))], 20) == []  # in a debugger
    other = replace(stopped, name="worker 0")
    assert lost([other, stopped], 20) == lost([replace(other, life=RUNS), stopped], 20) == []


def test_a_task_that_runs_is_ended_once_the_others_have_given_it_up() -> None:
    waits = Seen("worker 0", beat=replace(HERE, phase="recover"), life=RUNS, gives_up=30.0)
    for phase in ("step", "data", "exchange", "evaluate", "save"):
        spins = Seen("worker 1", beat=replace(HERE, phase=phase), life=RUNS, gives_up=30.0)
        assert lost([waits, spins], 40) == ["worker 1"]
        assert lost([waits, spins], 29) == []  # it may be slow
    for phase in ("start", "connect", "recover", "serve", "end"):  # it comes, or is done
        comes = Seen("worker 1", beat=replace(HERE, phase=phase), life=RUNS, gives_up=30.0)
        assert lost([waits, comes], 1000) == []
    patient = replace(waits, beat=replace(HERE, phase="exchange"))  # until its own limit
    slow = Seen("worker 1", beat=HERE, life=RUNS, gives_up=30.0)
    assert lost([patient, slow], 1000) == []


def test_who_sees_none_of_the_others_waits_longer() -> None:
    stopped = Seen("worker 1", beat=HERE, life=STOPPED, gives_up=30.0)
    assert lost([stopped], 9) == []
    assert lost([stopped], 11) == ["worker 1"]
    spins = replace(stopped, life=RUNS)
    assert lost([spins], 39) == []
    assert lost([spins], 70) == ["worker 1"]
    assert lost([replace(spins, beat=replace(HERE, phase="exchange"))], 1000) == []


@pytest.mark.parametrize(
    ("given", "env", "seconds"),
    [
        (None, {}, 5.0),
        (None, {"SPARTITO_TIMEOUT": "4"}, 2.0),
        (None, {"SPARTITO_TIMEOUT": "4", "SPARTITO_NOTICE": "30"}, 30.0),
        (1.5, {"SPARTITO_NOTICE": "30"}, 1.5),
    ],
)
def test_a_task_is_named_before_the_others_give_it_up(
    given: float | None, env: dict[str, str], seconds: float
) -> None:
    assert notice_limit(given, env) == seconds


@pytest.mark.parametrize(
    ("starts", "restarts", "vital", "waits"),
    [(1, 1, True, True), (2, 1, True, False), (2, 1, False, True)],
)
def test_others_give_a_task_up_where_it_starts_again_or_they_do_without_it(
    starts: int, restarts: int, vital: bool, waits: bool
) -> None:
    process = SimpleNamespace(restarts=restarts, vital=vital, gives_up=5.0)
    found = cast(Any, Running.gives_up).fget(SimpleNamespace(starts=starts, process=process))
    assert found == (5.0 if waits else None)


@pytest.mark.parametrize(
    ("recovery", "ps", "keeps"),
    [(Recovery(), 0, True), (Recovery(), 1, False), (None, 0, False), (None, 1, False)],
)
def test_a_launcher_keeps_the_store_of_a_job_that_outlives_its_first_task(
    recovery: Recovery | None, ps: int, keeps: bool
) -> None:
    launcher = cast(Any, SimpleNamespace(recovery=recovery))
    assert Processes.keeps_store(launcher, Roles(2, ps=ps)) == keeps
