from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from spartito.launch.processes import throttle as module
from tests.launch.supervised import LIMIT, Start, pid_of, vanished, wait_until

NOBODY = str(1 << 30)
"""No system has so many processes."""

ENDLESS = "import os\nprint('pid', os.getpid(), flush=True)\nwhile True: pass\n"


Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts python with arguments; at the end it is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def starter(*arguments: str) -> subprocess.Popen[bytes]:
        popen = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(popen)
        return popen

    yield starter
    for popen in started:
        popen.kill()
        popen.communicate(timeout=LIMIT)


def throttled(spawn: Spawn, *arguments: object) -> subprocess.Popen[bytes]:
    return spawn("-m", "spartito.launch.processes.throttle", *map(str, arguments))


def state(pid: int) -> str:
    """One letter of the kernel: R runs, S sleeps, T stands still."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("late", [0.0, 0.003, 0.1])
def test_a_process_gets_its_fraction_however_late_we_wake(
    late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = {signal.SIGCONT: 0.0, signal.SIGSTOP: 0.0}
    last = signal.SIGCONT

    def sleep(seconds: float) -> None:
        spent[last] += seconds + late

    def send(pid: int, number: int) -> None:
        nonlocal last
        last = signal.Signals(number or last)
        if sum(spent.values()) > 1000:
            raise ProcessLookupError

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: sum(spent.values()))
    monkeypatch.setattr(module, "time", clock)
    kernel = SimpleNamespace(kill=send, killpg=send, getpgid=lambda pid: pid)
    monkeypatch.setattr(module, "os", kernel)
    module.throttle(4711, 0.25)
    assert spent[signal.SIGCONT] / sum(spent.values()) == pytest.approx(0.25, abs=0.001)


def test_it_stops_and_goes_on_and_ends_with_the_process(spawn: Spawn) -> None:
    task = spawn("-S", "-c", "while True: pass")
    throttle = throttled(spawn, task.pid, 0.5)
    wait_until(lambda: state(task.pid) == "T")
    wait_until(lambda: state(task.pid) == "R")
    task.kill()
    task.wait(LIMIT)
    assert throttle.wait(LIMIT) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_throttle_that_is_ended_lets_the_process_go(spawn: Spawn, number: signal.Signals) -> None:
    task = spawn("-S", "-c", "while True: pass")
    throttle = throttled(spawn, task.pid, 0.05)
    wait_until(lambda: state(task.pid) == "T")
    throttle.send_signal(number)
    assert throttle.wait(LIMIT) == 0
    assert state(task.pid) == "R"


def test_a_process_that_is_gone_is_no_error(spawn: Spawn) -> None:
    task = spawn("-S", "-c", "")
    task.wait(LIMIT)
    assert throttled(spawn, task.pid, 0.5).wait(LIMIT) == 0


@pytest.mark.parametrize(
    "arguments",
    [(NOBODY,), ("x", "0.5"), ("0", "0.5"), (NOBODY, "0"), (NOBODY, "1.5"), (NOBODY, "slow")],
)
def test_bad_arguments_are_one_message(spawn: Spawn, arguments: tuple[str, ...]) -> None:
    throttle = throttled(spawn, *arguments)
    _, err = throttle.communicate(timeout=LIMIT)
    assert throttle.returncode == 2
    assert err.startswith(b"spartito: error: ")


def throttles_of(pid: int) -> list[int]:
    """The throttles that slow process ``pid`` down."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"spartito.launch.processes.throttle" in words and str(pid).encode() in words:
                found.append(int(folder.name))
    return found


def test_a_restarted_task_is_slow_again(start: Start) -> None:
    job = start(ENDLESS, ENDLESS, policies=[{"fraction": 0.5, "restarts": 1}, {}])
    job.wait_for_pids(2)
    slow = pid_of(job, 0)
    wait_until(lambda: state(slow) == "T")
    os.kill(slow, signal.SIGKILL)
    job.wait_for_pids(3)
    again = job.pids[2]
    wait_until(lambda: state(again) == "T")
    assert throttles_of(slow) == []
    (throttle,) = throttles_of(again)
    job.pids.append(throttle)
    job.popen.terminate()
    assert job.end()[0] == 143
    assert vanished(job.pids)


def test_no_throttle_outlives_a_killed_supervisor(start: Start) -> None:
    job = start(ENDLESS, policies=[{"fraction": 0.25}])
    job.wait_for_pids(1)
    wait_until(lambda: len(throttles_of(job.pids[0])) == 1)
    job.pids += throttles_of(job.pids[0])
    job.popen.kill()
    job.popen.wait(LIMIT)
    assert vanished(job.pids)


def test_after_ctrl_c_a_task_runs_at_full_speed(start: Start) -> None:
    careful = (
        "import os, pathlib\n"
        "module = b'spartito.launch.processes.throttle'\n"
        "def throttled():\n"
        "    for file in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        "        try: words = file.read_bytes().split(b'\\0')\n"
        "        except OSError: continue\n"
        "        if words[2:4] == [module, b'%d' % os.getpid()]: return True\n"
        "try:\n    print('pid', os.getpid(), flush=True)\n    while True: pass\n"
        "except KeyboardInterrupt:\n    while throttled(): pass\n    print('saved')"
    )
    job = start(careful, careful, policies=[{"fraction": 0.2}, {}])
    job.wait_for_pids(2)
    slow = pid_of(job, 0)
    wait_until(lambda: state(slow) == "T")
    job.popen.send_signal(signal.SIGINT)
    code, out, _ = job.end()
    assert code == 130
    assert sorted(out.splitlines()) == ["[worker 0] saved", "[worker 1] saved"]


def test_a_task_whose_throttle_is_killed_runs_on(start: Start) -> None:
    job = start(ENDLESS, ENDLESS, policies=[{"fraction": 0.05}, {}])
    job.wait_for_pids(2)
    slow = pid_of(job, 0)
    wait_until(lambda: state(slow) == "T")
    (throttle,) = throttles_of(slow)
    os.kill(throttle, signal.SIGKILL)
    assert job.popen.stderr is not None
    told = b"spartito: what slows worker 0 down is gone; it runs at full speed\n"
    assert job.popen.stderr.readline() == told
    wait_until(lambda: state(slow) == "R")
    job.popen.terminate()
    assert job.end()[0] == 143
