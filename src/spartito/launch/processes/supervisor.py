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

from spartito.errors import EXIT_PREEMPTED, EXIT_TASK_LOST, UserError
from spartito.failpoints import failpoint
from spartito.launch.processes.fork_server import Forks
from spartito.launch.processes.group_restart import fallen
from spartito.launch.processes.heartbeats import Heartbeats
from spartito.launch.processes.interrupts import ENDING
from spartito.launch.processes.job_end import done_at, done_beside, failure_of, report_failure
from spartito.launch.processes.logs import TaskLog
from spartito.launch.processes.output import Channel, ErrorChannel, Sink, binary
from spartito.launch.processes.pause import pausing
from spartito.launch.processes.process import (
    USUAL,
    Child,
    Failure,
    Patience,
    Process,
    Running,
    exit_code,
    out_of_memory,
    were_preempted,
)
from spartito.launch.processes.reaper import Reaper
from spartito.launch.processes.throttle import FULL, start_throttle
from spartito.system import die_with_parent
from spartito.system.capacity import MemoryKills, memory_kills

DOUBLE_CLICK = 0.05
"""Seconds within which a second Ctrl-C is the first one, sent to the whole group as well."""
TICK = 1.0
"""Seconds after which we look again even if nothing woke us."""


def supervise(
    processes: Sequence[Process],
    *,
    patience: Patience = USUAL,
    result_of: int | None = None,
    private: Sequence[str] = (),
    stacks: Path | None = None,
    notice: float | None = None,
    on_end: Callable[[Failure | None], None] | None = None,
    beside: Path | None = None,
    forks: Forks | None = None,
    sink: type[Sink] = Sink,
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
    it is printed last and as it is. ``private`` are folders of the job that are removed at its
    end, even when we are killed. ``stacks`` is a folder for the stacks of tasks that do not move,
    ``notice`` the seconds until one that stands still is named, ``beside`` a folder that all
    tasks see, for their heartbeats. ``forks`` is what tasks may be forked by.
    ``on_end`` is called when all have ended, with the failure
    that decided, if any, whose traceback is then not shown. ``sink`` is how lines are shown;
    ``out`` and ``err`` default to our own streams, which may be a notebook's. What a task started
    ends with the job, in a session of its own too. Must be called from the main thread, as it
    takes over signals. Raises `UserError` when a process cannot be started.
    """
    has_terminal = out is None and err is None and hasattr(sys.stdout, "buffer")
    sinks = sink.pair(out or binary(sys.stdout), err or binary(sys.stderr))
    keeps_terminal = len(processes) == 1 and has_terminal and on_end is None and sink is Sink
    beats = Heartbeats(sinks[1].say, stacks, notice, beside)
    job = _Supervisor(processes, patience, *sinks, beats, result_of, on_end, keeps_terminal, forks)
    return job.run(private)


def _nothing() -> None:
    """Who is not watched enlists nowhere."""


@dataclass
class _Supervisor:
    processes: Sequence[Process]
    patience: Patience
    out: Sink
    err: Sink
    beats: Heartbeats
    result_of: int | None
    on_end: Callable[[Failure | None], None] | None = None
    keeps_terminal: bool = False
    forks: Forks | None = None
    tasks: list[Running] = field(default_factory=list)
    cause: Running | None = None
    interrupted: signal.Signals | None = None
    interrupted_at: float = 0.0
    remind_at: float = float("inf")
    kill_at: float = float("inf")
    mark: Mapping[str, str] = field(default_factory=dict)
    memory: MemoryKills = field(default_factory=memory_kills)
    wake: int = -1
    before_exec: Callable[[], None] | None = field(default_factory=die_with_parent)
    enlists: int = -1
    enlist: Callable[[], None] = _nothing
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    @property
    def running(self) -> list[Running]:
        """The tasks that have not ended, as far as we know."""
        return [task for task in self.tasks if task.code is None]

    def run(self, private: Sequence[str]) -> int:
        with self._signals(), pausing(self._pause, self._resume):
            reaper = Reaper(*private, str(self.beats.folder))
            self.mark, self.enlists, self.enlist = reaper.mark, reaper.pipe, reaper.enlist()
            try:
                if self.forks:
                    self.forks.begin(self.processes, self.mark, lambda: bool(self.interrupted))
                for index in range(len(self.processes)):
                    if self.interrupted is None:
                        self._start(index)
                        reaper.watch(self._groups())
                if self.forks and not any(process.restarts for process in self.processes):
                    self.forks.end()
                self._forward()  # to one that was just starting when the signal came
                while self._groups():
                    self._wait()
                    if self._reap():
                        self._recover()
                        reaper.watch(self._groups())
                    self._end_late()
                    self._decide()
                code = self._report()
                if self.on_end is not None:
                    self.on_end(None if self.cause is None else failure_of(self.cause))
                return code
            finally:
                self._kill()
                if self.forks:
                    self.forks.end()
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
        for number in ENDING:
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
            self.remind_at = now + self.patience.remind
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

    def _before_task(self) -> None:
        """Called by a task before its program."""
        self.enlist()
        if self.before_exec is not None:
            self.before_exec()

    def _start(self, index: int, starts: int = 1) -> None:
        """Start the task with this index, or start it again."""
        process = self.processes[index].started(starts)
        log = TaskLog(process.log, starts > 1, self.err.say) if process.log else None
        pipe = None if self.keeps_terminal and log is None else subprocess.PIPE
        env = self.beats.begin(process.name, {**process.env, **self.mark}, process.remote)
        try:
            popen: Child = self._forked(process, env, pipe is not None) or subprocess.Popen(
                list(process.argv),
                env=env,
                stdin=None if self.keeps_terminal else subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                bufsize=0,
                start_new_session=True,
                preexec_fn=self._before_task,  # safe: we have one thread
            )
        except OSError as error:
            raise UserError(
                f"{process.name} cannot be started: {error}", "Are these more than fit here?"
            ) from error
        channels: list[Channel] = []
        if popen.stdout is not None and popen.stderr is not None:
            name, several = process.name, len(self.processes) > 1
            prefix = [sink.prefix(name, index, several) for sink in (self.out, self.err)]
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

    def _forked(self, process: Process, env: Mapping[str, str], pipes: bool) -> Child | None:
        """The process as a fork, if it can be one."""
        streams = None if pipes else range(3)
        return self.forks.start(process, env, self.enlists, streams) if self.forks else None

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
        for task in fallen(self.tasks, self.beats):
            if self.cause is not None or self.interrupted is not None:
                return
            process = task.process
            if task.comes_again:
                which = f"{task.starts} of {process.restarts}"
                self.err.say(f"{task.name} {task.how_it_failed}; it is started again ({which})")
                self._let_go(task)
                self._start(task.index, task.starts + 1)
                self._forward()  # a signal may have come while it was just starting
            elif (task.was_lost or task.was_preempted) and not process.vital:
                self.err.say(f"{task.name} {task.how_it_failed}; the others go on without it")
                self._let_go(task)
            elif task.lost_a_peer and done_beside(task, self.tasks):
                self.err.say(f"{task.name} found the others done; the job ends without it")
                self._let_go(task)

    def _lags(self, task: Running) -> bool:
        """Whether one stands still that the others would have replaced, or done without."""
        dispensable = task.process.restarts > 0 or not task.process.vital
        return task.code is None and dispensable and self.beats.stands(task.name)

    def _end_late(self) -> None:
        """End those that wait for a job that has ended, or stand still when it has."""
        since = done_at([task for task in self.tasks if not self._lags(task)])
        if since is None or time.monotonic() <= since + self.patience.stop:
            return
        for task in [task for task in self.running if not task.let_go]:
            if task.process.gives_up is not None:
                if task.starts > 1 and task.process.remote:
                    task.let_go = True
                    task.popen.send_signal(signal.SIGUSR1)  # it tries to reach its machine no more
                continue  # who came too late sees that itself
            if task.starts > 1 and not task.process.outlives:
                why = "came too late; the job has ended"
            elif self._lags(task):
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
        elif now >= self.remind_at and self.interrupted == signal.SIGINT:
            self.remind_at = float("inf")
            who = ", ".join(task.name for task in self.running)
            self.err.say(f"{who} did not end yet: interrupt again to end all at once")
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
            task.send(signal.SIGKILL if self.beats.stands(task.name) else signal.SIGTERM)
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
            report_failure(self.cause, self.tasks, self.err, shows=self.on_end is None)
            return exit_code(self.cause.outcome)
        return 0 if any(task.code == 0 for task in self.tasks) else EXIT_TASK_LOST
