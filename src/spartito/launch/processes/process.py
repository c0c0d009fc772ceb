"""One process of the job: what starts it, how it goes, how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from spartito.cluster import Task
from spartito.errors import EXIT_PREEMPTED, EXIT_TASK_LOST
from spartito.heartbeat import Beat
from spartito.launch.processes.logs import TaskLog, refused
from spartito.launch.processes.output import Channel, ErrorChannel
from spartito.launch.processes.roles import Roles
from spartito.launch.processes.throttle import FULL, fractions_of
from spartito.names import plural
from spartito.system.capacity import MemoryKills

FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP})
"""Signals by which a task is lost; by others, as SIGSEGV, it fails on its own."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the supervisor waits, in seconds."""

    stop: float = 5.0
    """From SIGTERM to SIGKILL for the others, once a task failed."""
    interrupt: float = 30.0
    """From Ctrl-C or SIGTERM to SIGKILL: a script may write a last checkpoint."""
    remind: float = 3.0
    """From Ctrl-C until it is said that a second one ends those that go on."""
    cause: float = 5.0
    """For the task that failed first, once another reports that it lost a peer."""
    report: float = 0.0
    """From a failure to SIGTERM for the others, while they may report it to other machines."""
    hold: float = 5.0
    """Until a traceback whose task lives on counts as ordinary output."""
    own_error: float = 30.0
    """The same for a message of ours, after which a task has only to end."""


USUAL = Patience()

AGAIN = "SPARTITO_STARTED_AGAIN"
"""The variable that says of a task on another machine that it is not its first start."""


@dataclass(frozen=True, slots=True)
class Process:
    """One task to start: its name as ``worker 1``, what to run, its whole environment.

    When it is killed from outside it is started again ``restarts`` times; after that the others
    go on without it unless it is ``vital``. It runs only ``fraction`` of the time. One that
    ``outlives`` the job ends by itself, however long after all vital ones. ``log`` is a file for
    all that it prints. One that is ``remote`` stands for a task on another machine. ``gives_up``
    are the seconds for which the others wait for it where a new process can stand for it.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    restarts: int = 0
    vital: bool = True
    fraction: float = FULL
    outlives: bool = False
    remote: bool = False
    log: Path | None = None
    gives_up: float | None = None

    def started(self, starts: int) -> Process:
        """As it is started for the ``starts``-th time."""
        if not self.remote or starts == 1:
            return self
        return replace(self, env={**self.env, AGAIN: "1"})


def process_of(
    task: Task, roles: Roles, argv: Sequence[str], env: Mapping[str, str], remote: bool = False
) -> Process:
    """The process of ``task`` in a job of ``roles``, which say what its loss means."""
    restarts = roles.restarts(task) if roles.asked else 0
    vital = roles.is_vital(task) if roles.asked else True
    outlives = task.type == "evaluator"
    return Process(str(task), argv, env, restarts, vital, outlives=outlives, remote=remote)


def with_fractions(processes: Sequence[Process], slow: Mapping[str, float]) -> list[Process]:
    """``processes`` with the fraction of the time that each runs, as `fractions_of` tells."""
    fractions = fractions_of([process.name for process in processes], slow)
    return [replace(one, fraction=part) for one, part in zip(processes, fractions, strict=True)]


def with_logs(processes: Sequence[Process], folder: Path | None) -> list[Process]:
    """``processes`` with a file in ``folder`` each, as ``worker-0.log``; without one, as they are.

    Makes the folder; `UserError` where that cannot be.
    """
    if folder is None:
        return list(processes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(folder, error) from error
    return [
        replace(process, log=folder.resolve() / f"{process.name.replace(' ', '-')}.log")
        for process in processes
    ]


class Child(Protocol):
    """A process that we have started, as `subprocess.Popen` shows it."""

    pid: int
    returncode: int | Any
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None:
        """How it ended, once it has."""

    def wait(self) -> int:
        """How it ended, when it has."""

    def send_signal(self, sig: int) -> None:
        """Signal it, if it runs."""


@dataclass
class Running:
    """One started process, the ``starts``-th start of the task with this ``index``.

    ``throttle`` is the process that slows it down, until it is ``released``. Once it is
    ``let_go``, how it ended does not matter to the job. ``memory`` says whether it had run out,
    ``missed`` that it ended well, but others wait for it; ``last_beat`` where it was then.
    ``lost_mate`` is a task without which it cannot go on, and with which it is started again unless
    it ``stays_out``; with one that ``holds_all`` the job ends.
    """

    process: Process
    index: int
    popen: Child
    channels: list[Channel]
    starts: int = 1
    log: TaskLog | None = None
    throttle: subprocess.Popen[bytes] | None = None
    released: bool = False
    let_go: bool = False
    code: int | None = None
    memory: str = ""
    failed_at: float = 0.0
    ended_at: float = 0.0
    forwarded: bool = False
    missed: str = ""
    last_beat: Beat | None = None
    lost_mate: str = ""
    stays_out: bool = False
    holds_all: bool = False

    @property
    def name(self) -> str:
        """What the task is called."""
        return self.process.name

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.popen.pid

    @property
    def awaited(self) -> bool:
        """Whether the others cannot do without it."""
        return self.process.vital and not self.process.outlives and not self.let_go

    @property
    def gives_up(self) -> float | None:
        """Seconds for which the others wait for it, where they can do without it then."""
        goes_on = self.starts <= self.process.restarts or not self.process.vital
        return self.process.gives_up if goes_on else None

    def end(self) -> None:
        """End it at once, with all that it started."""
        self.signal_group(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Signal the process itself, if it runs; nothing slows it down any more."""
        if self.code is None:
            self.release()
            self.popen.send_signal(number)

    def release(self) -> None:
        """From now on nothing slows it down."""
        self.released = True
        if self.throttle is not None:
            self.throttle.terminate()

    def lost_its_throttle(self) -> bool:
        """Whether what slows it down is gone, though we want it; it may stand still then."""
        if self.throttle is None or self.released or self.code is not None:
            return False
        return self.throttle.poll() is not None

    def pause(self) -> None:
        """Let it stand still, with all that it started and what slows it down."""
        if self.throttle is not None:
            self.throttle.send_signal(signal.SIGSTOP)
        if self.process.remote:
            self.popen.send_signal(signal.SIGTSTP)  # it passes that on
        else:
            self.signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        """End a `pause`."""
        self.signal_group(signal.SIGCONT)
        if self.throttle is not None:
            self.throttle.send_signal(signal.SIGCONT)

    def signal_group(self, number: int) -> None:
        """Signal the process and all that it started; harmless when they have ended."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def close(self) -> None:
        """End its throttle and close our ends of its pipes."""
        if self.throttle is not None:
            self.throttle.kill()
            self.throttle.wait()
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()
        if self.log is not None:
            self.log.close()

    @property
    def outcome(self) -> int:
        """What the process would have exited with.

        torch's threads sometimes abort a process that is ending after an exception: the
        exception it was, then.
        """
        errors = self.errors
        raised = errors is not None and bool(errors.held) and not errors.is_own_error
        if self.missed:
            return EXIT_TASK_LOST
        return 1 if self.code == -signal.SIGABRT and raised else self.code or 0

    @property
    def failed(self) -> bool:
        """Whether it ended as it should not have."""
        return bool(self.code or self.missed)

    @property
    def how_it_failed(self) -> str:
        """As an error says it: ``failed with exit code 1``."""
        code = self.outcome
        if self.was_preempted:
            return "was told to end, and saved all"
        if self.missed:
            return self.missed
        if self.lost_mate and self.lost_a_peer:
            return f"lost {self.lost_mate}, of its group"
        where = f" ({self.last_beat})" if self.last_beat else ""
        if code < 0:
            return f"was killed by {_signal_name(-code)}{self.memory}{where}"
        return f"failed with exit code {code}{where}"

    @property
    def errors(self) -> ErrorChannel | None:
        """Its stderr, None when it has the terminal."""
        return next((c for c in self.channels if isinstance(c, ErrorChannel)), None)

    @property
    def was_lost(self) -> bool:
        """Whether it was killed from outside, or ended with a task of its group that was."""
        return -(self.code or 0) in FROM_OUTSIDE or bool(self.lost_mate and self.lost_a_peer)

    @property
    def comes_again(self) -> bool:
        """Whether it was lost, and is to be started again."""
        return self.was_lost and self.starts <= self.process.restarts and not self.stays_out

    @property
    def was_preempted(self) -> bool:
        """Whether it was told to end, and saved what another run goes on from."""
        return self.code == EXIT_PREEMPTED

    @property
    def lost_a_peer(self) -> bool:
        """Whether it ended because another task was gone, by its own account."""
        return self.code == EXIT_TASK_LOST

    @property
    def fell_by_interrupt(self) -> bool:
        """Whether it ended as Ctrl-C ends a process, so that its traceback tells nothing."""
        held = self.errors.held if self.errors is not None else []
        last = next((line for line in reversed(held) if line.strip()), b"")
        killed = (self.code or 0) < 0
        return self.lost_a_peer or killed or last.startswith(b"KeyboardInterrupt")


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure that ended a job: the task, how it failed, and what it printed of its error."""

    task: str
    how: str
    text: str


def were_preempted(tasks: Sequence[Running]) -> bool:
    """Whether all ``tasks`` that count ended because they were told to, or were done."""
    codes = {task.code for task in tasks if task.process.vital and not task.let_go}
    return EXIT_PREEMPTED in codes and codes <= {0, EXIT_PREEMPTED}


def exit_code(code: int) -> int:
    """The job's exit code for a process that ended with ``code``, negative for a signal."""
    if code >= 0:
        return code
    return EXIT_TASK_LOST if -code in FROM_OUTSIDE else 128 - code


def out_of_memory(kills: MemoryKills) -> str:
    """How to go on after ``was killed by SIGKILL``, where the kernel did ``kills`` meanwhile.

    It counts whom it kills for want of memory, but does not say whom; empty if it killed nobody.
    """
    if kills.group > 0:
        return (
            ", most likely because memory ran out (the kernel counts "
            f"{plural(kills.group, 'kill')} for that in its control group)"
        )
    if kills.machine > 0:
        return (
            ", perhaps because memory ran out (the kernel counts "
            f"{plural(kills.machine, 'kill')} for that on this machine)"
        )
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
