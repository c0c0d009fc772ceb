"""What the kernel and the terminal do to a job: memory runs out, it is paused, it is killed."""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from spartito.launch.processes.process import out_of_memory
from spartito.system.capacity import MemoryKills
from tests.commands import commands_in
from tests.launch.supervised import (
    DAEMON,
    GRANDCHILD,
    LIMIT,
    SLEEPS,
    Job,
    Start,
    stands_still,
    vanished,
    wait_until,
)
from tests.skips import on_linux, skip

HUNGRY = "x = [bytearray(b'x' * (1 << 20)) for _ in range(1 << 10)]"
LIMITS = {"memory.limit_in_bytes": "memory", "memory.max": ""}
"""Where a cgroup's limit is written, by the controller of version 1 and by version 2."""


@contextmanager
def little_memory() -> Iterator[Callable[[Callable[[], Job]], Job]]:
    """Starts a job that has 64 MiB for all of its processes; skips where no cgroup can do that."""
    groups = [line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    found = [
        (Path("/sys/fs/cgroup") / controller / path.lstrip("/"), limit)
        for limit, controller in LIMITS.items()
        for name, path in groups
        if name == controller
    ]
    for ours, limit in found:  # noqa: B007
        folder = ours / f"spartito-test-{secrets.token_hex(4)}"
        with suppress(OSError):
            folder.mkdir()
            break
    else:
        skip("cgroup", "no cgroup of our own can be made here")

    def started(start: Callable[[], Job]) -> Job:
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        try:
            return start()
        finally:
            (ours / "cgroup.procs").write_text(str(os.getpid()))

    try:
        if not (folder / limit).exists():
            skip("cgroup", "no cgroup of our own can limit memory here")
        (folder / limit).write_text(str(64 << 20))
        yield started
    finally:
        wait_until(lambda: _removed(folder))


def _removed(folder: Path) -> bool:
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()


@on_linux
def test_who_ran_out_of_memory_is_told(start: Start) -> None:
    with little_memory() as started:
        code, _, err = started(lambda: start(SLEEPS, HUNGRY)).end()
    assert code == 69
    assert re.search(
        "worker 0 was stopped because worker 1 was killed by SIGKILL, most likely because memory "
        r"ran out \(the kernel counts \d+ kills? for that in its control group\)",
        err,
    )


def test_what_the_kernels_counts_mean() -> None:
    assert out_of_memory(MemoryKills(0, 0)) == ""
    assert "2 kills for that in its control group" in out_of_memory(MemoryKills(2, 3))
    assert ", perhaps because memory ran out" in out_of_memory(MemoryKills(0, 1))


def test_a_pause_reaches_all_and_ends_for_all(start: Start) -> None:
    job = start(GRANDCHILD, SLEEPS)
    job.wait_for_pids(3)
    everyone = [job.popen.pid, *job.pids]
    for _ in range(2):
        job.popen.send_signal(signal.SIGTSTP)
        wait_until(lambda: all(map(stands_still, everyone)))
        job.popen.send_signal(signal.SIGCONT)
        wait_until(lambda: not any(map(stands_still, everyone)))
    job.popen.terminate()
    assert job.end()[0] == 143


def test_a_pause_stops_what_slows_a_task_down_too(start: Start) -> None:
    job = start(SLEEPS, SLEEPS, policies=[{}, {"fraction": 0.5}])
    job.wait_for_pids(2)
    wait_until(lambda: len(throttles(job)) == 1)
    everyone = [job.popen.pid, *job.pids, *throttles(job)]
    job.popen.send_signal(signal.SIGTSTP)
    wait_until(lambda: all(map(stands_still, everyone)))
    job.popen.kill()
    job.popen.wait(LIMIT)
    assert vanished(everyone)


def throttles(job: Job) -> list[int]:
    """The processes that slow the tasks down."""
    children = Path(f"/proc/{job.popen.pid}/task/{job.popen.pid}/children").read_text().split()
    return [
        int(pid) for pid in children if b"throttle" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_what_stands_for_a_far_task_is_told_of_a_pause(start: Start, tmp_path: Path) -> None:
    told = {name: tmp_path / name for name in ("SIGTSTP", "SIGCONT")}
    hears = "import signal\n" + "".join(
        f"signal.signal(signal.{name}, lambda *_: open({str(path)!r}, 'w').close())\n"
        for name, path in told.items()
    )
    job = start(hears + SLEEPS, SLEEPS, policies=[{"remote": True}, {}])
    job.wait_for_pids(2)
    job.popen.send_signal(signal.SIGTSTP)
    wait_until(told["SIGTSTP"].exists)
    wait_until(lambda: stands_still(job.popen.pid))  # it stops last; SIGCONT before is none
    job.popen.send_signal(signal.SIGCONT)
    wait_until(told["SIGCONT"].exists)
    job.popen.terminate()
    assert job.end()[0] == 143


@pytest.mark.parametrize("kill", [False, True])
def test_what_left_its_process_group_ends_with_the_job(start: Start, kill: bool) -> None:
    job = start(DAEMON, SLEEPS)
    job.wait_for_pids(3)
    (daemon,) = (p for p in job.pids if b"task" not in Path(f"/proc/{p}/cmdline").read_bytes())
    assert os.getpgid(daemon) == daemon
    if kill:
        job.popen.kill()
    else:
        job.popen.terminate()
    job.popen.wait(LIMIT)
    assert vanished(job.pids)


NOTEBOOK = """
import io, sys
from spartito.launch.job import JobSpec, Program
from spartito.launch.processes.local import Local
real, sys.stdout = sys.stdout, io.StringIO()
sys.stderr = io.StringIO()
code = Local().start(JobSpec(program=Program("task.py"), workers=int(sys.argv[1])))
print(code, sys.stdout.getvalue().splitlines(), sys.stderr.getvalue().splitlines(), file=real)
"""


def test_a_notebook_gets_what_the_tasks_print(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        commands.write("task.py", "import sys\nprint('caf\\u00e9'); sys.exit('why')\n")
        commands.write("notebook.py", NOTEBOOK)
        ended = commands.python("notebook.py", "1")
        assert (
            ended.out == "1 ['caf\u00e9'] ['why', 'spartito: worker 0 failed with exit code 1']\n"
        )
