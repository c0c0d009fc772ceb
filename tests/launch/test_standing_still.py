"""Real processes that stop, hang or end too early, and what the launcher says of them."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed import HashStore

import spartito
from spartito.collectives.membership.liveness import LivenessCheck
from spartito.collectives.membership.store import Membership
from spartito.collectives.membership.torch_store import OfTorch
from spartito.errors import TaskLostError
from spartito.heartbeat import SIZE, Beat, file_of, keep_files, last_words, stands
from spartito.launch.processes.heartbeats import Heartbeats
from tests.commands import eventually
from tests.launch.supervised import WAITS, Job, Start

SOURCE = Path(spartito.__file__).parents[1]
TASK = f"""
import sys, os, time
sys.path.insert(0, {str(SOURCE)!r})
from spartito.heartbeat import *
begin()
print('pid', os.getpid(), flush=True)
"""
STEPS = "for step in range(20):\n    beat(step, STEP); time.sleep(0.05)\n"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARTITO_NOTICE", "0.5")


def said(job: Job, words: str) -> str:
    """The line on stderr that has these words, and all before it."""
    assert job.popen.stderr is not None
    lines = ""
    while words not in lines:
        line = job.popen.stderr.readline().decode()
        assert line, lines
        lines += line
    return lines


def test_a_stopped_task_is_named_until_it_goes_on(start: Start) -> None:
    stops = TASK + "import signal\nbeat(41, STEP)\nos.kill(os.getpid(), signal.SIGSTOP)"
    job = start(stops, TASK)
    job.wait_for_pids(2)
    line = said(job, "worker 0 is stopped by a signal (at step 41, in 'step')")
    pid = int(line.partition("kill -CONT ")[2].split()[0])
    assert pid in job.pids
    os.kill(pid, signal.SIGCONT)
    assert job.end()[0] == 0


def test_a_stopped_task_that_others_miss_is_started_again(start: Start, tmp_path: Path) -> None:
    again = tmp_path / "again"
    stops = TASK + (
        f"import signal, pathlib\nbeat(41, STEP)\nagain = pathlib.Path({str(again)!r})\n"
        "if again.exists(): sys.exit(0)\n"
        "again.touch()\nos.kill(os.getpid(), signal.SIGSTOP)"
    )
    waits = TASK + f"import pathlib\nbeat(41, EXCHANGE)\n{WAITS}"
    own = {"restarts": 1, "gives_up": 300.0}
    job = start(stops, waits, policies=[own, own])
    assert "worker 0 does not move, and the others miss it" in said(job, "is started again (1 of 1")
    job.popen.terminate()
    assert job.end()[0] == 143


def test_a_loop_that_holds_the_interpreters_lock_is_shown_from_outside(start: Start) -> None:
    hangs = TASK + STEPS + "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')"
    job = start(hangs, TASK + WAITS)
    job.wait_for_pids(2)
    line = said(job, "(at step 19, in 'step'; a step takes ").splitlines()[-1]
    assert "worker 0 has not moved for" in line
    found = re.search(r"a step takes ([\d.]+) s", line)
    assert found
    assert float(found[1]) >= 0.05  # more on a busy machine
    assert "in match" in said(job, "task0.py")
    job.popen.terminate()
    assert job.end()[0] == 143


def test_a_task_that_ends_before_it_meets_the_others_ends_the_job(start: Start) -> None:
    waits = TASK + "with during(CONNECT):\n    time.sleep(300)"
    code, _, err = start(waits, "").end()
    assert code == 69
    assert "worker 1 ended with exit code 0 before it met the others: worker 0 waits" in err


def test_what_a_killed_task_did_last_is_known_to_all(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARTITO_STACKS", str(tmp_path / "stacks"))
    dies = TASK + "import signal\nbeat(41, DATA)\nos.kill(os.getpid(), signal.SIGKILL)"
    tells = TASK + (
        "while 'step 41' not in (words := last_words('worker 0 (10.0.0.1:1234)')): pass\n"
        "print(words, last_words('worker 7'), dump_stacks('a reason'), flush=True)\n" + WAITS
    )
    job = start(dies, tells, policies=[{"vital": False}, {}])
    assert "worker 0 was killed by SIGKILL (at step 41, in 'data')" in said(job, "go on without")
    line = job.printed("last seen")
    path = tmp_path / "stacks" / "worker-1.txt"
    assert re.search(r"\(last seen at step 41, in 'data', \d+ s ago\)", line), line
    assert line.endswith(f"  The stacks of this task are in {path}.\n")
    text = path.read_text()
    assert "a reason" in text
    assert "task1.py" in text
    job.popen.terminate()
    job.end()


def test_nothing_that_a_replacement_did_is_said_of_a_lost_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beats = Heartbeats(print)
    name, other = "worker 1 (10.0.0.1:1234)", file_of(beats.folder, "worker 0")
    monkeypatch.setenv("SPARTITO_HEARTBEAT", str(other))
    try:
        env = beats.begin("worker 1", os.environ)
        subprocess.run([sys.executable, "-c", TASK + "beat(41, STEP)"], env=env, check=True)
        keep_files([name])
        beats.begin("worker 1", os.environ)
        assert last_words(name).startswith(" (last seen at step 41, in 'step', ")
        keep_files([name])
        assert last_words(name) == " (it has not come to a strategy yet)"
    finally:
        beats.close()


def test_the_others_know_of_a_task_that_it_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that keeps the store where tasks meet: it is not asked for seconds."""
    beats = Heartbeats(print)
    monkeypatch.setenv("SPARTITO_HEARTBEAT", str(file_of(beats.folder, "worker 1")))
    try:
        env = beats.begin("worker 0", os.environ)
        words = [sys.executable, "-c", TASK + "beat(41, STEP)\n" + "sys.stdin.read()"]
        with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
            assert one.stdout is not None
            one.stdout.readline()
            assert not stands("worker 0")
            one.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, one.pid, os.WSTOPPED | os.WNOWAIT)
            assert stands("worker 0 (10.0.0.1:1234)")
            store = OfTorch(HashStore())
            check = LivenessCheck(Membership(1, ["worker 0", "worker 1"], store, 60.0))
            assert check.reason(TaskLostError("worker 0 did not come")) is None
            assert not store.gather(["1"], 0.0)
            one.send_signal(signal.SIGCONT)
        assert not stands("worker 0")
    finally:
        beats.close()


@dataclass
class Alone:
    """A task of no supervisor."""

    name: str
    pid: int
    missed: str = ""
    starts: int = 1
    code: int | None = None
    awaited: bool = False
    gives_up: float | None = None

    def end(self) -> None:
        """Nobody asks for it here."""


def test_a_wait_for_stacks_changes_nothing_that_is_said_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spartito.launch.processes.heartbeats.STACKS_SECONDS", 1.2)
    lines: list[str] = []
    beats = Heartbeats(lines.append, notice=0.2)
    stops = "import signal\nos.kill(os.getpid(), signal.SIGSTOP)"
    mute = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])\n" + STEPS
    scripts = {"worker 0": stops, "worker 1": mute + WAITS, "worker 2": mute + WAITS}
    popens: list[subprocess.Popen[bytes]] = []
    try:
        for name, script in scripts.items():
            words = [sys.executable, "-c", TASK + script]
            popens.append(subprocess.Popen(words, env=beats.begin(name, os.environ)))
        tasks = [Alone(name, one.pid) for name, one in zip(scripts, popens, strict=True)]

        def told() -> bool:
            beats.look(tasks)
            return sum("has not moved" in line for line in lines) == 2

        assert eventually(told), lines
        assert any("worker 0 is stopped" in line for line in lines), lines
        monkeypatch.setattr(beats, "_next", 0.0)
        beats.look(tasks)
        assert not any("goes on" in line for line in lines), lines
    finally:
        for one in popens:
            one.kill()
            one.wait()
        beats.close()


def test_a_beat_that_is_just_written_is_not_read_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spartito.heartbeat.TRIES", 1)
    whole = struct.pack("@8Q", 41, 7, 3, 1, 10**9, 2, 3, 10**9).ljust(SIZE, b"\0")
    assert Beat.read_from(whole).time == 1.0
    for count in range(64):
        part = whole[:count].ljust(SIZE, b"\0")
        assert part == whole or Beat.read_from(part).phase == ""


def test_a_child_of_a_task_does_not_speak_for_it(start: Start) -> None:
    child = TASK + "beat(99, STEP)"
    parent = TASK + (
        f"import subprocess\nbeat(3, STEP)\nsubprocess.run([sys.executable, '-c', {child!r}])\n"
        "os.abort()"
    )
    assert "was killed by SIGABRT (at step 3, in 'step')" in start(parent, "").end()[2]
