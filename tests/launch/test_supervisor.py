from __future__ import annotations

import io
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from spartito.errors import PREFIX
from spartito.launch.processes.heartbeats import Heartbeats
from spartito.launch.processes.output import Sink
from spartito.launch.processes.process import Patience, Process, exit_code
from spartito.launch.processes.supervisor import _Supervisor
from tests.launch.supervised import (
    LIMIT,
    SLEEPS,
    WAITS,
    Start,
    wait_until,
    waits_for,
)


def test_each_line_carries_its_task_and_its_stream(start: Start) -> None:
    script = "import sys; print('out'); print('more'); print('err', file=sys.stderr)"
    code, out, err = start(script, script).end()
    assert code == 0
    for name in ("worker 0", "worker 1"):
        assert [line for line in out.splitlines() if name in line] == [
            f"[{name}] out",
            f"[{name}] more",
        ]
    assert sorted(err.splitlines()) == ["[worker 0] err", "[worker 1] err"]


def test_a_partial_last_line_and_long_lines_and_bytes_come_through(start: Start) -> None:
    script = (
        "import sys\n"
        "sys.stdout.write('x' * 1_000_000 + '\\n'); sys.stdout.flush()\n"
        "some = bytes(b for b in range(256) if b not in b'\\r\\n')\n"
        "sys.stdout.buffer.write(some); sys.stdout.flush()"
    )
    job = start(script, "")
    out, _ = job.popen.communicate(timeout=LIMIT)
    binary = bytes(b for b in range(256) if b not in b"\r\n")
    assert out == b"[worker 0] " + b"x" * 1_000_000 + b"\n[worker 0] " + binary + b"\n"


BAR = """
import sys
for step in range(3):
    sys.stderr.write(f"\\r{step}%")
    sys.stderr.flush()
    with open(sys.argv[0] + ".go") as go:
        go.read()
raise ValueError("boom")
"""


def test_a_progress_bar_is_shown_as_it_comes(start: Start, tmp_path: Path) -> None:
    go = tmp_path / "task0.py.go"
    os.mkfifo(go)
    job = start(BAR, SLEEPS)
    assert job.popen.stderr is not None
    for step in range(3):
        shown = b"\r[worker 0] %d%%" % step
        assert job.popen.stderr.read(len(shown)) == shown
        go.write_text("")
    code, _, err = job.end()
    assert code == 1
    bar, told, first, *_ = err.split("\n")
    assert bar == "\r[worker 0] 2%"
    assert told == "spartito: worker 1 was stopped because worker 0 failed with exit code 1"
    assert first == "Traceback (most recent call last):"


def test_a_single_task_keeps_the_terminal(start: Start) -> None:
    code, out, err = start("import sys; print('a', end='\\r'); sys.exit('why')").end()
    assert (code, out, err) == (1, "a\r", "why\n")


def test_the_tasks_end_when_they_like_and_zero_is_their_code(start: Start) -> None:
    log = "import logging\ntry: 1 / 0\nexcept ZeroDivisionError: logging.exception('logged')\n"
    code, out, err = start("print('quick')", log + "print('slow')").end()
    assert code == 0
    assert {"[worker 0] quick", "[worker 1] slow"} == set(out.splitlines())
    assert "[worker 1] Traceback (most recent call last):\n" in err
    assert "[worker 1] ZeroDivisionError: division by zero\n" in err


def test_the_first_traceback_is_shown_whole_and_the_others_stop(start: Start) -> None:
    fails = "def deep():\n    raise ValueError('boom')\nprint('here', flush=True)\ndeep()\n"
    job = start(SLEEPS, fails, SLEEPS)
    code, out, err = job.end()
    assert code == 1
    assert "[worker 1] here\n" in out
    first, *rest = err.splitlines()
    assert first == (
        "spartito: worker 0, worker 2 were stopped because worker 1 failed with exit code 1"
    )
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[-1] == "ValueError: boom"
    assert "    raise ValueError('boom')" in rest
    assert err.count("Traceback") == 1


TELLS = """
import fcntl, os, signal, sys, time
from pathlib import Path
lock = os.open({lock!r}, os.O_RDWR | os.O_CREAT)
signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
while not os.path.exists({held!r}): time.sleep(0.005)
Path({ready!r}).touch()
fcntl.flock(lock, fcntl.LOCK_EX)  # once its holder is dead
time.sleep(0.5)  # what telling takes
print("told", flush=True)
sys.exit(69)
"""
DIES = """
import fcntl, os, signal, time
lock = os.open({lock!r}, os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
open({held!r}, "w").close()
while not os.path.exists({ready!r}): time.sleep(0.005)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_others_may_get_time_to_say_whom_they_lost(start: Start, tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in ("lock", "held", "ready")}
    code, out, err = start(TELLS.format(**files), DIES.format(**files), report=LIMIT).end()
    assert code == 69
    assert "[worker 0] told\n" in out
    assert "worker 0 was stopped because worker 1 was killed by SIGKILL" in err


def test_the_others_tracebacks_are_not_shown(start: Start, tmp_path: Path) -> None:
    falls = (
        f"import os, signal, time\nfrom pathlib import Path\n"
        f"def stop(*_): raise RuntimeError('fell')\n"
        f"signal.signal(signal.SIGTERM, stop)\n"
        f"Path({str(tmp_path / 'ready')!r}).touch()\n{WAITS}"
    )
    fails = waits_for(tmp_path / "ready") + "raise KeyError('first')"
    code, _, err = start(falls, fails).end()
    assert code == 1
    assert "KeyError: 'first'" in err
    assert "fell" not in err


def test_a_syntax_error_is_shown_once(start: Start) -> None:
    code, _, err = start("def", "def", "def").end()
    assert code == 1
    assert err.count("SyntaxError") == 1


@pytest.mark.parametrize("code", [1, 3, 76])
def test_the_failing_tasks_code_is_the_jobs(start: Start, code: int) -> None:
    got, _, err = start(SLEEPS, f"raise SystemExit({code})").end()
    assert got == code
    assert f"worker 0 was stopped because worker 1 failed with exit code {code}" in err


def test_tasks_that_were_told_to_end_did_not_fail(start: Start) -> None:
    got, _, err = start(
        "raise SystemExit(75)", "import time; time.sleep(0.3); raise SystemExit(75)"
    ).end()
    assert got == 75
    assert "stopped" not in err
    got, _, err = start(
        "raise SystemExit(75)", "import time; time.sleep(0.3); raise SystemExit(3)"
    ).end()
    assert got == 3
    assert "worker 1 failed with exit code 3" in err


def test_who_lost_a_peer_is_not_the_cause(start: Start, tmp_path: Path) -> None:
    ready = str(tmp_path / "lost")
    lost = f"import sys, pathlib; pathlib.Path({ready!r}).touch(); sys.exit(69)"
    fails = waits_for(ready) + "raise ValueError('cause')"
    code, _, err = start(lost, fails, cause=LIMIT).end()
    assert code == 1
    assert "ValueError: cause" in err


def test_who_raised_first_is_the_cause_though_it_ends_later(start: Start, tmp_path: Path) -> None:
    raised, fell = str(tmp_path / "raised"), str(tmp_path / "fell")
    first = (
        f"import atexit, os, sys, threading, time\n"
        f"def linger():\n    open({raised!r}, 'w').close()\n"
        f"    while not os.path.exists({fell!r}): time.sleep(0.005)\n"
        f"atexit.register(linger)\nraise ValueError('first')"
    )
    second = (
        waits_for(raised) + f"import atexit; atexit.register(lambda: open({fell!r}, 'w').close())\n"
        f"raise ConnectionError('second')"
    )
    code, _, err = start(first, second, cause=LIMIT).end()
    assert code == 1
    assert "ValueError: first" in err
    assert "second" not in err


def test_a_traceback_that_nobody_has_read_yet_counts_too(tmp_path: Path) -> None:
    raised = str(tmp_path / "raised")
    first = (
        f"import atexit, time\n"
        f"def linger():\n    open({raised!r}, 'w').close()\n    time.sleep(300)\n"
        f"atexit.register(linger)\nraise ValueError('first')"
    )
    second = waits_for(raised) + "raise ValueError('second')"
    tasks = [
        Process(f"worker {index}", [sys.executable, "-S", "-c", script], dict(os.environ))
        for index, script in enumerate((first, second))
    ]
    shown = Sink(io.BytesIO(), False)
    beats = Heartbeats(shown.say)
    job = _Supervisor(tasks, Patience(cause=LIMIT), shown, shown, beats, None, before_exec=None)
    try:
        for index in range(2):
            job._start(index)
        wait_until(lambda: job.tasks[1].popen.poll() is not None)
        assert job._reap()
        job._decide()
        assert job.cause is None  # the first may end yet
    finally:
        job._kill()
        for task in job.tasks:
            task.popen.wait()
            task.close()
        beats.close()
        job.selector.close()


def test_an_abort_at_the_end_of_an_exception_is_the_exception(start: Start) -> None:
    aborts = "import atexit, os; atexit.register(os.abort)\nraise ValueError('boom')"
    code, _, err = start(SLEEPS, aborts).end()
    assert code == 1
    assert "worker 1 failed with exit code 1" in err
    assert err.endswith("ValueError: boom\n")


def test_without_another_cause_the_loss_is_told(start: Start) -> None:
    message = f"{PREFIX}worker 1 did not come within 60 s"
    lost = f"import sys; print({message!r}, file=sys.stderr); sys.exit(69)"
    code, _, err = start(lost, SLEEPS, cause=0.05).end()
    assert (code, err) == (69, message + "\n")


def test_the_same_mistake_of_all_is_shown_once(start: Start) -> None:
    mistake = f"import sys; print({PREFIX + 'no'!r}, '  do this', sep='\\n', file=sys.stderr)\n"
    code, _, err = start(*[mistake + "sys.exit(2)"] * 3).end()
    assert (code, err) == (2, f"{PREFIX}no\n  do this\n")


def test_a_killed_task_is_lost(start: Start) -> None:
    job = start(SLEEPS, SLEEPS)
    job.wait_for_pids(2)
    os.kill(job.pids[1], signal.SIGKILL)
    code, _, err = job.end()
    assert code == 69
    assert re.search(r"worker \d was stopped because worker \d was killed by SIGKILL", err)


def test_a_crash_has_the_shells_code(start: Start) -> None:
    code, _, err = start(SLEEPS, "import os; os.abort()").end()
    assert code == 128 + signal.SIGABRT
    assert "worker 1 was killed by SIGABRT" in err


def test_a_single_task_that_is_killed_is_named(start: Start) -> None:
    job = start(SLEEPS)
    job.wait_for_pids(1)
    os.kill(job.pids[0], signal.SIGKILL)
    code, _, err = job.end()
    assert (code, err) == (69, "spartito: worker 0 was killed by SIGKILL\n")


def test_a_task_that_ignores_sigterm_is_killed(start: Start, tmp_path: Path) -> None:
    ready = str(tmp_path / "ready")
    deaf = f"open({ready!r}, 'w').close()\n" + SLEEPS
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + deaf
    fails = waits_for(ready) + "raise SystemExit(5)"
    job = start(deaf, fails, stop=0.05)
    assert job.end()[0] == 5


def test_a_frozen_task_stops_too(start: Start, tmp_path: Path) -> None:
    ready = str(tmp_path / "frozen")
    fails = waits_for(ready) + "raise SystemExit(5)"
    job = start(SLEEPS, fails)
    job.wait_for_pids(1)
    os.kill(job.pids[0], signal.SIGSTOP)
    Path(ready).touch()
    assert job.end()[0] == 5


def test_a_logged_traceback_of_a_task_that_lives_on_is_shown(start: Start) -> None:
    job = start("import traceback\ntry: 1 / 0\nexcept: traceback.print_exc()\n" + SLEEPS, SLEEPS)
    job.popen.terminate()
    job.end()
    job = start(
        "import traceback\ntry: 1 / 0\nexcept: traceback.print_exc()\n" + SLEEPS, SLEEPS, hold=0.05
    )
    assert job.popen.stderr is not None
    assert job.popen.stderr.readline() == b"[worker 0] Traceback (most recent call last):\n"


def test_our_own_error_waits_for_the_end_of_its_task(start: Start, tmp_path: Path) -> None:
    told, go = tmp_path / "told", tmp_path / "go"
    fails = (
        "import os, sys, time\n"
        f"print('{PREFIX}boom', file=sys.stderr, flush=True)\n"
        f"open('{told}', 'w').close()\n"
        f"while not os.path.exists('{go}'): time.sleep(0.01)\n"
        "sys.exit(2)"
    )
    logs = (
        "import os, time, traceback\n"
        f"while not os.path.exists('{told}'): time.sleep(0.01)\n"
        "try: 1 / 0\nexcept: traceback.print_exc()\n"
    )
    job = start(fails, logs + SLEEPS, hold=0.05)
    assert job.popen.stderr is not None
    assert job.popen.stderr.readline() == b"[worker 1] Traceback (most recent call last):\n"
    go.touch()
    code, _, err = job.end()
    assert code == 2
    assert [line for line in err.splitlines() if PREFIX in line] == [f"{PREFIX}boom"]


def test_the_result_is_the_last_line_and_has_no_name(start: Start) -> None:
    code, out, _ = start("print('a'); print('{}')", "print('b')", result_of=0).end()
    assert code == 0
    assert out.endswith("\n{}\n")
    assert sorted(out.splitlines()[:-1]) == ["[worker 0] a", "[worker 1] b"]


def test_exit_codes_of_signals() -> None:
    assert [exit_code(c) for c in (0, 7, -9, -15, -11, -2)] == [0, 7, 69, 69, 139, 130]
