"""What is done to a task from outside: signals, limits, a file of its checkpoint or its data."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from spartito.chaos.schedule import KINDS
from spartito.errors import UserError
from spartito.launch.lines.network import Machine
from spartito.launch.processes.throttle import start_throttle
from spartito.system import die_with_parent

PAUSED = 2.0
"""Seconds that ``pause`` lets a task stand still."""

LOSSY = 5.0
"""Seconds for which ``loss`` loses packets."""

PARTED = 3.0
"""Seconds for which ``partition`` takes a task off the network."""

TENTH, FIFTH = 0.1, 0.2
SIGNALS = {
    "kill": signal.SIGKILL,
    "torn": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "pause": signal.SIGSTOP,
    "term": signal.SIGTERM,
}
SPOILED = b"\0not what was here\n"


@dataclass(frozen=True, slots=True)
class Target:
    """What a fault is done to.

    Args:
        pid: the process of the task.
        out: the run folder of the job, with its checkpoints.
        sample: a file of the data, for ``corrupt``.
        machine: the machine of the task, for faults of the network.
    """

    pid: int
    out: Path
    sample: Path | None = None
    machine: Machine | None = None


@dataclass
class Injected:
    """What was done and can be taken back.

    Args:
        heal_after: seconds after which `heal` is due; None: not before the end of the job.
    """

    undo: list[Callable[[], None]] = field(default_factory=list)
    heal_after: float | None = None

    def heal(self) -> None:
        """Take it back, once; also what is gone by itself."""
        while self.undo:
            self.undo.pop()()


def inject(kind: str, target: Target) -> Injected:
    """Do it now.

    Args:
        kind: a fault that is not inside a task.
        target: to what.

    Returns:
        What takes it back.

    Raises:
        UserError: ``corrupt`` without a file to spoil.
    """
    done = Injected()
    if kind == "slow":
        throttle = start_throttle(target.pid, TENTH, die_with_parent())
        done.undo.append(lambda: _end(throttle))
    elif kind == "memory":
        _limit_memory(target.pid)
    elif kind == "corrupt":
        if target.sample is None:
            raise UserError("corrupt needs a file of the data", "Name one by --sample FILE.")
        _spoil(target.sample, done)
    elif KINDS[kind].network:
        assert target.machine is not None
        _disturb(kind, target.machine, done)
    else:
        _signal(target.pid, SIGNALS[kind])
    if kind == "pause":
        done.heal_after = PAUSED
        done.undo.append(lambda: _signal(target.pid, signal.SIGCONT))
    if kind == "torn":
        tear(target.out)
    return done


def _disturb(kind: str, machine: Machine, done: Injected) -> None:
    if kind == "loss":
        machine.lose(FIFTH)
        done.undo.append(machine.open_all)
        done.heal_after = LOSSY
    elif kind == "cut":
        machine.silence()
        done.undo.append(machine.open_all)
    else:
        machine.cut()
        done.undo.append(machine.join)
        done.heal_after = PARTED


def tear(out: Path) -> Path | None:
    """Cut off half of the largest file of the newest checkpoint below a folder.

    Args:
        out: the folder of a run.

    Returns:
        The file; None where there is no checkpoint.
    """
    manifests = sorted(out.rglob("manifest.json"), key=lambda path: path.stat().st_mtime_ns)
    if not manifests:
        return None
    files = [path for path in manifests[-1].parent.iterdir() if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return largest


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _end(throttle: subprocess.Popen[bytes]) -> None:
    throttle.terminate()  # it lets its process run on at full speed
    throttle.wait()


def _limit_memory(pid: int) -> None:
    """No more pages than the process has mapped, and nothing at the end of its heap."""
    with suppress(ProcessLookupError, FileNotFoundError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        size = pages * os.sysconf("SC_PAGE_SIZE")
        resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def _spoil(sample: Path, done: Injected) -> None:
    kept = sample.read_bytes()
    sample.write_bytes(SPOILED)
    done.undo.append(lambda: _write(sample, kept))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
