"""Start the tasks of a job, pass on what they print, and end them all when one fails."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from spartito.device import MemoryKills, memory_kills
from spartito.errors import EXIT_PREEMPTED, EXIT_TASK_LOST, UserError
from spartito.failpoints import failpoint
from spartito.launch.heartbeats import Heartbeats
from spartito.launch.logs import TaskLog
from spartito.launch.output import Channel, ErrorChannel, Sink, binary
from spartito.launch.pause import pausing
from spartito.launch.process import (
    USUAL,
    Patience,
    Process,
    Running,
    exit_code,
    out_of_memory,
    were_preempted,
)
from spartito.launch.reaper import Reaper, die_with_parent
from spartito.launch.throttle import FULL, start_throttle

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DOUBLE_CLICK = 0.05
"""Seconds within which a second Ctrl-C is the first one, sent to the whole group as well."""
TICK = 1.0
"""Seconds after which we look again even if nothing woke us."""


def supervise(
    processes: Sequence[Process],
    *,
    patience: Patience = USUAL,
    result_of: int | None = None,
    private: str | None = None,
    stacks: Path | None = None,
    notice: float | None = None,
    out: BinaryIO | None = None,
    err: BinaryIO | None = None,
) -> int:
    """Run ``processes`` until all have ended; returns the exit code of the job.

    Each line of output gets its task's name. The first task that fails decides: its traceback
    is shown whole, once, after the others were stopped, and its exit code is the job's; 69 when
    it was killed from outside, 128 + n when it crashed by signal n. A task that exits with 69
    lost another one, so that one is looked for first. Ctrl-C and SIGTERM go to all tasks once;
    then the code is 130 or 143. Ctrl-Z stops the tasks too, until ``fg`` or ``bg``. A single
    task keeps the terminal, without a prefix, unless what it prints is logged.

    A task that is killed from outside may start again, or the others may go on without it, as
    its `Process` says. Then it does not fail the job; nor does one that is not vital and lost
    the others because they had done their work.

    ``result_of`` is the index of a process whose last line on stdout is the result of the job:
    it is printed last and as it is. ``private`` is a folder of the job that is removed at its
    end, even when we are killed. ``stacks`` is a folder for the stacks of tasks that do not move,
    ``notice`` the seconds until one that stands still is named. ``out`` and ``err`` default to our
    own streams, which may be a notebook's. What a task started ends with the job, in a session of
    its own too. Must be called from the main thread, as it takes over signals. Raises `UserError`
    when a process cannot be started.
    """
    has_terminal = out is None and err is None and hasattr(sys.stdout, "buffer")
    sinks = Sink.pair(out or binary(sys.stdout), err or binary(sys.stderr))
    keeps_terminal = len(processes) == 1 and has_terminal
    beats = Heartbeats(sinks[1].say, stacks, notice)
    return _Supervisor(processes, patience, *sinks, beats, result_of, keeps_terminal).run(private)


@dataclass
class _Supervisor:
    processes: Sequence[Process]
    patience: Patience
    out: Sink
    err: Sink
    beats: Heartbeats
    result_of: int | None
    keeps_terminal: bool = False
    tasks: list[Running] = field(default_factory=list)
    cause: Running | None = None
    interrupted: signal.Signals | None = None
    interrupted_at: float = 0.0
    kill_at: float = float("inf")
    mark: Mapping[str, str] = field(default_factory=dict)
    memory: MemoryKills = field(default_factory=memory_kills)
    wake: int = -1
    before_exec: Callable[[], None] | None = field(default_factory=die_with_parent)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    @property
    def running(self) -> list[Running]:
        """The tasks that have not ended, as far as we know."""
        return [task for task in self.tasks if task.code is None]

    def run(self, private: str | None) -> int:
        with self._signals(), pausing(self._pause, self._resume):
            reaper = Reaper(private, str(self.beats.folder))
            self.mark = reaper.mark
            try:
                for index in range(len(self.processes)):
                    if self.interrupted is None:
                        self._start(index)
                        reaper.watch(self._groups())
                self._forward()  # to one that was just starting when the signal came
                while self._groups():
                    self._wait()
                    if self._reap():
                        self._recover()
                        reaper.watch(self._groups())
                    self._end_late()
                    self._decide()
                return self._report()
            finally:
                self._kill()
                for task in self.tasks:
                    task.popen.wait()
                    task.close()
                self.beats.close()
                reaper.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Our handlers, and a pipe by which a signal wakes the selector."""
        self.wake, woken = os.pipe()
        for fd in (self.wake, woken):
            os.set_blocking(fd, False)
        old_fd = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        old = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda number, frame: None)}
        for number in INTERRUPTS:
            ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not ignored:  # nohup
                old[number] = signal.signal(number, self._interrupt)
        self.selector.register(self.wake, selectors.EVENT_READ, None)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_fd)
            self.selector.close()
            os.close(self.wake)
            os.close(woken)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Acts at once: the loop may be waiting for a slow reader of our output."""
        now = time.monotonic()
        if self.interrupted is None and self.cause is None:
            self.interrupted, self.interrupted_at = signal.Signals(number), now
            self.kill_at = now + self.patience.interrupt
            self._forward()
        elif number == signal.SIGINT and now - self.interrupted_at > DOUBLE_CLICK:
            self._kill()

    def _pause(self) -> None:
        for task in self.running:
            task.pause()

    def _resume(self) -> None:
        for task in self.running:
            task.resume()

    def _forward(self) -> None:
        if self.interrupted is not None:
            for task in self.tasks:
                if not task.forwarded:
                    task.forwarded = True
                    task.send(self.interrupted)

    def _start(self, index: int, starts: int = 1) -> None:
        """Start the task with this index, or start it again."""
        process = self.processes[index]
        log = TaskLog(process.log, starts > 1, self.err.say) if process.log else None
        pipe = None if self.keeps_terminal and log is None else subprocess.PIPE
        try:
            popen = subprocess.Popen(
                list(process.argv),
                env={**process.env, **self.mark, **self.beats.begin(process.name, process.remote)},
                stdin=None if self.keeps_terminal else subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                bufsize=0,
                start_new_session=True,
                preexec_fn=self.before_exec,  # safe: we have one thread
            )
        except OSError as error:
            raise UserError(
                f"{process.name} cannot be started: {error}", "Are these more than fit here?"
            ) from error
        channels: list[Channel] = []
        if popen.stdout is not None and popen.stderr is not None:
            name = process.name if len(self.processes) > 1 else ""
            prefix = self.out.prefix(name, index), self.err.prefix(name, index)
            write = None if log is None else log.write
            last = index == self.result_of
            channels = [
                Channel(popen.stdout.fileno(), self.out, prefix[0], last, log=write),
                ErrorChannel(popen.stderr.fileno(), self.err, prefix[1], log=write),
            ]
        for channel in channels:
            os.set_blocking(channel.fd, False)
            self.selector.register(channel.fd, selectors.EVENT_READ, channel)
        task = Running(process, index, popen, channels, starts, log=log)
        self.tasks[index : index + 1] = [task]
        self._slow_down(task)
        failpoint("launch.supervisor.started")

    def _slow_down(self, task: Running) -> None:
        if task.process.fraction == FULL:
            return
        try:
            task.throttle = start_throttle(task.popen.pid, task.process.fraction, self.before_exec)
        except OSError as error:
            raise UserError(f"{task.name} cannot be slowed down: {error}") from error
        if task.released:  # a signal came meanwhile
            task.release()

    def _groups(self) -> list[int]:
        """The process groups of the tasks that run, and of their throttles."""
        throttles = [task.throttle.pid for task in self.running if task.throttle is not None]
        return [task.popen.pid for task in self.running] + throttles

    def _wait(self) -> None:
        """Until something is printed, a process ends, a signal comes, or a time limit passes."""
        self._read(max(0.0, self._deadline() - time.monotonic()))
        with suppress(BlockingIOError):
            os.read(self.wake, 4096)

    def _read(self, seconds: float) -> None:
        """Take what is printed within ``seconds``, in the order in which it came."""
        for key, _ in self.selector.select(seconds):
            channel: Channel | None = key.data
            if channel is not None and not channel.read():
                self.selector.unregister(key.fd)

    def _deadline(self) -> float:
        times = [time.monotonic() + min(TICK, self.beats.every), self.kill_at]
        limits = self.patience.cause, self.patience.report
        times += [task.ended_at + limit for task in self.tasks if task.code for limit in limits]
        times += [since + self._holds(errors) for since, errors in self._held()]
        now = time.monotonic()
        return min((at for at in times if at > now), default=now)

    def _held(self) -> list[tuple[float, ErrorChannel]]:
        """The running tasks' errors that are held back, and since when."""
        errors = (task.errors for task in self.running)
        return [(e.since, e) for e in errors if e is not None and e.held]

    def _holds(self, errors: ErrorChannel) -> float:
        return self.patience.own_error if errors.is_own_error else self.patience.hold

    def _reap(self) -> bool:
        """Take note of the processes that ended, and end what they left behind."""
        ended = [task for task in self.running if task.popen.poll() is not None]
        if ended:
            self._read(0.0)  # another's traceback that came before theirs counts as the first
        for task in ended:
            task.signal_group(signal.SIGKILL)
            task.code = task.popen.returncode
            task.last_beat = self.beats.beat_of(task.name)
            if task.code == -signal.SIGKILL:
                task.memory = self._ran_out()
            for channel in task.channels:
                channel.drain()
                if channel.fd in self.selector.get_map():
                    self.selector.unregister(channel.fd)
            task.close()
            errors = task.errors
            task.ended_at = time.monotonic()
            task.failed_at = errors.since if errors and errors.held else task.ended_at
            if task.code == 0 and errors:
                errors.release()
        for task in filter(Running.lost_its_throttle, self.tasks):
            self.err.say(f"what slows {task.name} down is gone; it runs at full speed")
            task.release()
            task.signal_group(signal.SIGCONT)
        return bool(ended)

    def _ran_out(self) -> str:
        """Whether memory ran out since we looked last, as an error says it."""
        before, self.memory = self.memory, memory_kills()
        return out_of_memory(self.memory.since(before))

    def _recover(self) -> None:
        """Start again, or do without, those that ended and may; the job then goes on."""
        for task in [task for task in self.tasks if task.code and not task.let_go]:
            if self.cause is not None or self.interrupted is not None:
                return
            process = task.process
            if task.was_lost and task.starts <= process.restarts:
                self.err.say(
                    f"{task.name} {task.how_it_failed}; "
                    f"it is started again ({task.starts} of {process.restarts})"
                )
                self._let_go(task)
                self._start(task.index, task.starts + 1)
                self._forward()  # a signal may have come while it was just starting
            elif (task.was_lost or task.was_preempted) and not process.vital:
                self.err.say(f"{task.name} {task.how_it_failed}; the others go on without it")
                self._let_go(task)
            elif task.lost_a_peer and self._done_beside(task):
                self.err.say(f"{task.name} found the others done; the job ends without it")
                self._let_go(task)

    def _done_at(self) -> float | None:
        """When the last of the vital tasks ended well; None as long as one has not."""
        vital = [task for task in self.tasks if task.process.vital and not task.let_go]
        if not vital or any(task.code != 0 for task in vital):
            return None
        return max(task.ended_at for task in vital)

    def _done_beside(self, task: Running) -> bool:
        """Whether the others had done their work when ``task`` was lost, or started again."""
        if not task.process.vital and self._done_at() is not None:
            return True
        others = [other for other in self.tasks if other is not task and not other.let_go]
        return task.starts > 1 and bool(others) and all(other.code == 0 for other in others)

    def _end_late(self) -> None:
        """End those that wait for a job that has ended, or stand still when it has."""
        since = self._done_at()
        if since is None or time.monotonic() <= since + self.patience.stop:
            return
        for task in [task for task in self.running if not task.let_go]:
            if task.starts > 1 and not task.process.outlives:
                why = "came too late; the job has ended"
            elif not task.process.vital and self.beats.stands(task.name):
                why = "does not move, and the others have ended; it is ended, too"
            else:
                continue
            self.err.say(f"{task.name} {why}")
            task.let_go = True
            task.signal_group(signal.SIGKILL)

    def _let_go(self, task: Running) -> None:
        """Print what was kept of an ended task that fails nobody."""
        task.let_go = True
        if task.errors is not None:
            task.errors.release()
        for channel in task.channels:
            channel.close(as_result=False)

    def _decide(self) -> None:
        """Stop the others once it is clear who failed first; kill those that do not stop."""
        now = time.monotonic()
        if now >= self.kill_at:
            self._kill()
        if self.cause is not None or self.interrupted is not None:
            return
        self.beats.look([task for task in self.tasks if not task.let_go])
        for since, errors in self._held():
            if now - since >= self._holds(errors):
                errors.release()
        ended = [task for task in self.tasks if task.failed and not task.let_go]
        failed = [task for task in ended if not task.was_preempted]
        if ended and not failed:  # who was told to end has told the others in the same step
            self.kill_at = min(self.kill_at, now + self.patience.interrupt)
        if not failed:
            return
        first = min(failed, key=lambda task: (task.lost_a_peer, task.failed_at))
        another = (first.lost_a_peer and self._groups()) or any(
            since < first.failed_at
            for since, _ in self._held()  # its traceback came first
        )
        limits = self.patience.cause * bool(another), self.patience.report * bool(self._groups())
        if now < first.ended_at + max(limits):
            return
        self.cause = first
        self.kill_at = now + self.patience.stop
        for task in self.tasks:
            task.send(signal.SIGTERM)
            task.send(signal.SIGCONT)  # one that is stopped would not see it

    def _kill(self) -> None:
        for task in self.running:
            task.signal_group(signal.SIGKILL)

    def _report(self) -> int:
        """Say how it ended; returns the exit code."""
        for task in self.tasks:
            for channel in task.channels:
                channel.close(as_result=self.cause is None and self.interrupted is None)
        if self.cause is None and were_preempted(self.tasks):
            return EXIT_PREEMPTED
        if self.interrupted is not None:
            for task in self.tasks:
                if task.errors is not None and not task.fell_by_interrupt:
                    task.errors.release()
            self.err.say(f"stopped by {self.interrupted.name}")
            return 128 + self.interrupted
        if self.cause is not None:
            self._report_failure(self.cause)
            return exit_code(self.cause.outcome)
        return 0 if any(task.code == 0 for task in self.tasks) else EXIT_TASK_LOST

    def _report_failure(self, cause: Running) -> None:
        errors = cause.errors
        if errors is not None and errors.is_own_error:
            self.err.write(errors.held)
            return
        if others := [t.name for t in self.tasks if t.code and not t.let_go and t is not cause]:
            verb = "was" if len(others) == 1 else "were"
            why = f"{cause.name} {cause.how_it_failed}"
            self.err.say(f"{', '.join(others)} {verb} stopped because {why}")
        elif errors is not None or cause.missed or (cause.code or 0) < 0:
            self.err.say(f"{cause.name} {cause.how_it_failed}")  # else its own words suffice
        if errors is not None:
            self.err.write(errors.held)
