"""Tasks that are killed from outside: started again, done without, or the end of the job."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launch.supervised import (
    LIMIT,
    SLEEPS,
    Start,
    pid_of,
    vanished,
    wait_until,
    waits_for,
)

PS: dict[str, Any] = {"restarts": 3, "vital": True}
WORKER: dict[str, Any] = {"restarts": 3, "vital": False}
CHIEF: dict[str, Any] = {}
KILLS_ITSELF = "import os, signal; print('dies', flush=True); os.kill(os.getpid(), signal.SIGKILL)"


def dies_first(folder: Path, times: int, then: str) -> str:
    """A task that kills itself at its first ``times`` starts, and does ``then`` at the next."""
    return (
        f"import os, signal, pathlib\nstarts = pathlib.Path({str(folder / 'starts')!r})\n"
        f"with starts.open('a') as file: file.write('x')\n"
        f"if len(starts.read_text()) <= {times}:\n"
        "    print('half', end='', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n" + then
    )


@pytest.mark.parametrize("times", [1, 3])
def test_a_server_that_is_killed_is_started_again(start: Start, tmp_path: Path, times: int) -> None:
    back = tmp_path / "back"
    server = dies_first(tmp_path, times, f"print('back'); open({str(back)!r}, 'w').close()")
    code, out, err = start(waits_for(back), server, policies=[CHIEF, PS]).end()
    assert code == 0
    assert out.splitlines() == ["[worker 1] half"] * times + ["[worker 1] back"]
    assert err.splitlines() == [
        f"spartito: worker 1 was killed by SIGKILL; it is started again ({n} of 3)"
        for n in range(1, times + 1)
    ]


@pytest.mark.parametrize("policy", ["worker", "ps"])
def test_who_is_started_again_too_late_is_ended(start: Start, tmp_path: Path, policy: str) -> None:
    waits = dies_first(tmp_path, 1, "open('again', 'w').close()\n" + SLEEPS)
    chief = f"import os\nos.chdir({str(tmp_path)!r})\n" + waits_for(tmp_path / "again")
    late = f"import os\nos.chdir({str(tmp_path)!r})\n" + waits
    policies = [CHIEF, WORKER if policy == "worker" else PS]
    code, _, err = start(chief, late, policies=policies, stop=0.05).end()
    assert code == 0
    assert err.splitlines()[-1] == "spartito: worker 1 came too late; the job has ended"


def test_who_stands_still_when_all_is_done_is_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARTITO_NOTICE", "0.5")
    stands = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    policies = [CHIEF, WORKER, {"vital": False, "outlives": True}, PS]
    code, _, err = start("pass", stands, stands, stands, policies=policies, stop=0.05).end()
    assert code == 0, err
    for worker in ("worker 1", "worker 2", "worker 3"):
        assert f"{worker} does not move, and the others have ended; it is ended, too\n" in err


def test_a_server_that_is_killed_too_often_ends_the_job(start: Start) -> None:
    job = start(SLEEPS, KILLS_ITSELF, policies=[CHIEF, PS])
    code, out, err = job.end()
    assert code == 69
    assert out.count("dies") == 4
    *restarts, end = err.splitlines()
    assert len(restarts) == 3
    assert end == "spartito: worker 0 was stopped because worker 1 was killed by SIGKILL"


def test_the_others_go_on_without_a_worker(start: Start, tmp_path: Path) -> None:
    out_of_starts = dies_first(tmp_path, 9, "")
    chief = (
        f"import pathlib, time\nstarts = pathlib.Path({str(tmp_path / 'starts')!r})\n"
        "while not starts.exists() or len(starts.read_text()) < 4: time.sleep(0.005)\n"
        "print('done')"
    )
    code, out, err = start(chief, out_of_starts, policies=[CHIEF, WORKER]).end()
    assert code == 0
    assert "[worker 0] done" in out.splitlines()
    assert len(err.splitlines()) == 4
    assert err.splitlines()[-1] == (
        "spartito: worker 1 was killed by SIGKILL; the others go on without it"
    )


def test_a_chief_that_is_killed_ends_the_job(start: Start) -> None:
    job = start(SLEEPS, SLEEPS, policies=[CHIEF, WORKER])
    job.wait_for_pids(2)
    os.kill(pid_of(job, 0), signal.SIGKILL)
    code, _, err = job.end()
    assert code == 69
    assert err == "spartito: worker 1 was stopped because worker 0 was killed by SIGKILL\n"


def test_who_was_lost_before_is_not_among_those_that_are_stopped(
    start: Start, tmp_path: Path
) -> None:
    dies = (
        f"import os\nos.symlink(f'/proc/{{os.getpid()}}', {str(tmp_path / 'there')!r})\n"
        + KILLS_ITSELF
    )
    fails = (
        f"import os, time\nthere = {str(tmp_path / 'there')!r}\n"
        "while not os.path.islink(there): time.sleep(0.005)\n"
        "while os.path.exists(there): time.sleep(0.005)\n"  # the supervisor has not seen it
        "raise SystemExit(5)"
    )
    policies = [CHIEF, {"vital": False}, CHIEF]
    code, _, err = start(fails, dies, SLEEPS, policies=policies).end()
    assert code == 5
    assert err.splitlines() == [
        "spartito: worker 1 was killed by SIGKILL; the others go on without it",
        "spartito: worker 2 was stopped because worker 0 failed with exit code 5",
    ]


@pytest.mark.parametrize("code", [1, 69])
def test_a_task_that_fails_by_itself_is_not_started_again(start: Start, code: int) -> None:
    fails = f"raise SystemExit({code})"
    got, _, err = start(SLEEPS, fails, policies=[CHIEF, WORKER], cause=0.05).end()
    assert got == code
    assert err == f"spartito: worker 0 was stopped because worker 1 failed with exit code {code}\n"


def test_a_crash_is_a_failure_of_its_own(start: Start) -> None:
    got, _, err = start(SLEEPS, "import os; os.abort()", policies=[CHIEF, WORKER]).end()
    assert got == 128 + signal.SIGABRT
    assert "started again" not in err


def test_those_that_are_left_are_waited_for(start: Start, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    chief = f"import atexit; atexit.register(lambda: open({str(ended)!r}, 'w').close())"
    evaluator = waits_for(ended) + "print('last')"
    code, out, err = start(chief, evaluator, policies=[CHIEF, WORKER]).end()
    assert (code, out, err) == (0, "[worker 1] last\n", "")


def test_who_comes_back_when_all_is_done_does_not_fail_the_job(
    start: Start, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"
    chief = f"import atexit; atexit.register(lambda: open({str(ended)!r}, 'w').close())"
    late = waits_for(ended) + "print('nobody is here'); raise SystemExit(69)"
    code, out, err = start(chief, late, policies=[CHIEF, WORKER], cause=LIMIT).end()
    assert code == 0
    assert out == "[worker 1] nobody is here\n"
    assert err == "spartito: worker 1 found the others done; the job ends without it\n"


def test_what_a_killed_task_kept_is_printed(start: Start, tmp_path: Path) -> None:
    back = tmp_path / "back"
    dies = dies_first(tmp_path, 1, f"open({str(back)!r}, 'w').close()\nprint('[1]')").replace(
        "    print('half', end='', flush=True)\n",
        "    import sys; print('{}', flush=True)\n"
        "    print('Traceback (most recent call last):', file=sys.stderr, flush=True)\n",
    )
    code, out, err = start(dies, waits_for(back), policies=[WORKER, CHIEF], result_of=0).end()
    assert code == 0
    assert out == "[worker 0] {}\n[1]\n"
    assert "[worker 0] Traceback (most recent call last):\n" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_those_that_were_started_again(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    job = start(SLEEPS, dies_first(tmp_path, 1, SLEEPS), policies=[CHIEF, PS])
    job.wait_for_pids(2)
    job.popen.send_signal(number)
    code, _, err = job.end()
    assert code == 128 + number
    assert err.count("started again") == 1
    assert err.endswith(f"spartito: stopped by {number.name}\n")


def test_a_signal_amid_restarts_leaves_nothing(start: Start) -> None:
    endless = "import os\nprint('pid', os.getpid(), flush=True)\nos.kill(os.getpid(), 9)"
    job = start(SLEEPS, endless, policies=[CHIEF, {"restarts": 10**6}])
    job.wait_for_pids(6)
    job.popen.send_signal(signal.SIGTERM)
    assert job.end()[0] == 143
    assert vanished(job.pids)


def test_nothing_outlives_a_supervisor_that_is_killed_after_a_restart(
    start: Start, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "snapshot").touch()
    job = start(SLEEPS, dies_first(tmp_path, 1, SLEEPS), policies=[CHIEF, PS], private=str(private))
    job.wait_for_pids(2)
    job.popen.kill()
    job.popen.wait(LIMIT)
    assert vanished(job.pids)
    wait_until(lambda: not private.exists())
    assert (tmp_path / "task0.py").exists()
