from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spartito.chaos.judge import Record, Setup, judge
from spartito.chaos.schedule import Fault
from spartito.chaos.traces import Step, pause_after
from spartito.chaos.trial import Outcome

KILL = (Fault("kill", "worker:1", 3),)
MIRRORED = Setup("mirrored")


def steps(first: int, last: int, begin: float = 0.0) -> list[Step]:
    return [Step(begin + n / 10, n, float(n).hex()) for n in range(first, last + 1)]


def lines(*epochs: int, loss: float = 0.5) -> list[dict[str, Any]]:
    return [{"epoch": n, "step": 3 * n, "loss": loss, "val_loss": 1.0} for n in epochs]


PLAIN = Outcome(0, 1.0, 1.0, (), "", {"worker:0": steps(1, 6), "worker:1": steps(1, 6)}, ())
REFERENCE = Record((PLAIN,), lines(1, 2))
FELL = Outcome(
    69,
    1.0,
    0.5,
    (0.4,),
    "spartito: worker 0 was stopped because worker 1 was killed by SIGKILL",
    {"worker:0": steps(1, 4), "worker:1": steps(1, 4)},
    (),
)
WENT_ON = replace(PLAIN, traces={"worker:0": steps(4, 6, 9.0), "worker:1": steps(4, 6, 9.0)})
SURVIVED = Record((FELL, WENT_ON), lines(1, 2))


def test_a_job_that_keeps_its_promise() -> None:
    verdict = judge(KILL, MIRRORED, REFERENCE, SURVIVED)
    assert verdict.broken == ()
    assert (verdict.code, verdict.restarts, verdict.repeated, verdict.lost) == (69, 1, 1, 0)
    assert verdict.seconds == pytest.approx(0.1)
    assert verdict.difference == 0.0


def test_a_machine_with_other_work_may_take_longer() -> None:
    late = replace(SURVIVED, outcomes=(replace(FELL, ended=60.4), WENT_ON))
    (broken,) = judge(KILL, MIRRORED, REFERENCE, late).broken
    assert broken == "60.0 s until it was over, 10 are promised"
    assert judge(KILL, replace(MIRRORED, slack=55.0), REFERENCE, late).broken == ()


def test_a_step_that_another_task_has_ended_is_not_lost() -> None:
    traces = {"worker:0": [*steps(1, 3), *steps(5, 6)], "worker:1": steps(1, 6)}
    went_on = replace(PLAIN, fired=(0.35,), traces=traces)
    recovers = Setup("mirrored", recovers=True)
    verdict = judge(KILL, recovers, REFERENCE, Record((went_on,), lines(1, 2)))
    assert (verdict.broken, verdict.lost) == ((), 0)


def other(number: int) -> list[Step]:
    return [
        replace(step, loss=(9.0).hex()) if step.number == number else step for step in steps(4, 6)
    ]


BROKEN = {
    "exit code 1 instead of 69": Record((replace(FELL, code=1), WENT_ON), lines(1, 2)),
    "it hung: no end within 1 s": Record((replace(FELL, code=None), WENT_ON), lines(1, 2)),
    "worker 1 unnamed": Record((replace(FELL, text="worker 1 fell"), WENT_ON), lines(1, 2)),
    "it left process 7": Record((replace(FELL, left=("process 7",)), WENT_ON), lines(1, 2)),
    "the run that goes on left a": Record((FELL, replace(WENT_ON, left=("a",))), lines(1, 2)),
    "60.0 s until it was over, 10 are promised": Record(
        (replace(FELL, ended=60.4), WENT_ON), lines(1, 2)
    ),
    "the fault did not happen": Record((replace(FELL, fired=()), WENT_ON), lines(1, 2)),
    "started again: exit code 2": Record((FELL, replace(WENT_ON, code=2)), lines(1, 2)),
    "1 losses differ, first of step 5: 9.0, not 5.0": Record(
        (FELL, replace(WENT_ON, traces={"worker:0": other(5)})), lines(1, 2)
    ),
    "2 steps were never done, first 5": Record(
        (FELL, replace(WENT_ON, traces={"worker:0": steps(4, 4)})), lines(1, 2)
    ),
    "the history has the epochs [1, 2, 2], not [1, 2]": Record((FELL, WENT_ON), lines(1, 2, 2)),
    "epoch 1 of the history: loss is [0.6, 0.5]": Record((FELL, WENT_ON), lines(1, 2, loss=0.6)),
}


@pytest.mark.parametrize("why", BROKEN)
def test_a_broken_promise_is_said(why: str) -> None:
    broken = judge(KILL, MIRRORED, REFERENCE, BROKEN[why]).broken
    assert any(said.startswith(why) for said in broken), broken


def test_where_the_order_of_updates_differs_the_last_loss_is_close() -> None:
    setup = Setup("parameter_server", asynchronous=True, served=True)
    went_on = replace(PLAIN, fired=(0.3,), text=FELL.text)
    near = Record((went_on,), lines(1, 2, loss=0.55))
    assert judge(KILL, setup, REFERENCE, near).broken == ()
    far = Record((went_on,), lines(1, 2, loss=0.7))
    assert judge(KILL, setup, REFERENCE, far).broken == ("the last loss is off by +0.2000",)


@pytest.mark.parametrize(
    ("more", "why"), [(-2, "2 updates were lost"), (3, "3 updates were applied twice")]
)
def test_updates_of_servers_are_counted(more: int, why: str) -> None:
    setup = Setup("parameter_server", asynchronous=True, served=True)
    went_on = replace(PLAIN, fired=(0.3,), text=FELL.text)
    reference = replace(REFERENCE, applied={"ps-0": 6, "ps-1": 6})
    found = Record((went_on,), lines(1, 2), {"ps-0": 6, "ps-1": 6 + more})
    assert why in judge(KILL, setup, reference, found).broken


def test_the_pause_is_that_of_the_last_task_to_step_again() -> None:
    traces = {"worker:0": steps(1, 6), "worker:1": [*steps(1, 2), *steps(3, 4, 5.0)]}
    assert pause_after(traces, 0.25) == pytest.approx(5.3 - 0.25)
    assert pause_after({**traces, "worker:2": steps(1, 2)}, 0.25) is None
