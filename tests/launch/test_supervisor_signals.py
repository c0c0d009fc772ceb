"""Signals to a supervisor, and what outlives it: nothing."""

from __future__ import annotations

import signal
import time
from textwrap import indent

import pytest

from spartito.launch.processes.supervisor import DOUBLE_CLICK
from tests.launch.supervised import (
    GRANDCHILD,
    LEAVES,
    LIMIT,
    SLEEPS,
    Start,
    vanished,
)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_signal_ends_all(start: Start, number: signal.Signals, code: int, count: int) -> None:
    job = start(*[SLEEPS] * count)
    job.wait_for_pids(count)
    job.popen.send_signal(number)
    got, _, err = job.end()
    assert got == code
    assert err.endswith(f"spartito: stopped by {number.name}\n")
    if count > 1:
        assert "Traceback" not in err


INTERRUPTED = f"try:\n{indent(SLEEPS, '    ')}except KeyboardInterrupt: "


def test_on_ctrl_c_a_task_may_finish_its_work(start: Start) -> None:
    careful = INTERRUPTED + "print('saved')"
    job = start(careful, careful)
    job.wait_for_pids(2)
    job.popen.send_signal(signal.SIGINT)
    code, out, err = job.end()
    assert code == 130
    assert sorted(out.splitlines()) == ["[worker 0] saved", "[worker 1] saved"]
    assert err == "spartito: stopped by SIGINT\n"


def test_what_goes_wrong_on_ctrl_c_is_shown(start: Start) -> None:
    clumsy = INTERRUPTED + "raise OSError('disk full') from None"
    job = start(clumsy, SLEEPS)
    job.wait_for_pids(2)
    job.popen.send_signal(signal.SIGINT)
    code, _, err = job.end()
    assert code == 130
    assert "[worker 0] OSError: disk full\n" in err


DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SLEEPS
HEARS = (
    "import os, signal; signal.signal(signal.SIGINT, lambda *_: os.write(1, b'heard\\n'))\n"
    + SLEEPS
)


def test_a_second_ctrl_c_kills(start: Start) -> None:
    job = start(HEARS, HEARS, interrupt=10 * LIMIT, remind=0.0)
    job.wait_for_pids(2)
    job.popen.send_signal(signal.SIGINT)
    assert job.popen.stdout is not None
    heard = sorted(job.popen.stdout.readline() for _ in range(2))
    assert heard == [b"[worker 0] heard\n", b"[worker 1] heard\n"]
    assert job.popen.stderr is not None
    said = job.popen.stderr.readline()
    assert b"worker 0, worker 1 did not end yet: interrupt again to end all at once\n" in said
    time.sleep(2 * DOUBLE_CLICK)  # what came sooner would count as the first
    job.popen.send_signal(signal.SIGINT)
    assert job.end()[0] == 130


def test_who_does_not_hear_a_signal_is_killed_in_the_end(start: Start) -> None:
    job = start(DEAF, DEAF, interrupt=0.05)
    job.wait_for_pids(2)
    job.popen.send_signal(signal.SIGINT)
    assert job.end()[0] == 130


PRINTS = (  # past python's buffer, which would be written at the end of the task
    "import os\nprint('pid', os.getpid(), flush=True)\n"
    "while True: os.write(1, b'x' * 1000 + b'\\n')"
)


def test_ctrl_c_reaches_tasks_though_nobody_reads_our_output(start: Start) -> None:
    job = start(PRINTS, PRINTS)
    job.wait_for_pids(2)
    job.popen.send_signal(signal.SIGINT)  # our pipe is full; the tasks end before it is read
    assert vanished(job.pids)
    assert job.end()[0] == 130


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_outlives_a_killed_supervisor(start: Start, count: int) -> None:
    job = start(*[GRANDCHILD] * count)
    job.wait_for_pids(2 * count)
    job.popen.kill()
    job.popen.wait(LIMIT)
    assert vanished(job.pids)


def test_nothing_outlives_the_job(start: Start) -> None:
    job = start(LEAVES, LEAVES)
    assert job.end()[0] == 0
    assert len(job.pids) == 4
    assert vanished(job.pids)


def test_grandchildren_of_stopped_tasks_go_too(start: Start) -> None:
    job = start(GRANDCHILD, SLEEPS)
    job.wait_for_pids(3)
    job.popen.terminate()
    assert job.end()[0] == 143
    assert vanished(job.pids)


def test_who_closes_our_output_ends_the_job(start: Start) -> None:
    job = start(PRINTS, PRINTS)
    job.wait_for_pids(2)
    assert job.popen.stdout is not None
    job.popen.stdout.close()
    assert vanished(job.pids)
    assert job.popen.wait(LIMIT) != 0
