"""Follows the containers of a job: what they print, how they end, and what that means."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from spartito.errors import EXIT_PREEMPTED, EXIT_TASK_LOST
from spartito.launch.containers.engine import Engine, TaskState
from spartito.launch.containers.file import JobFile
from spartito.launch.processes.output import Sink, binary, prefixed
from spartito.notes import say

LOOK_SECONDS = 2.0
"""How often we look how the containers go, when none of them has ended."""

NEVER: Mapping[str, int] = MappingProxyType({})

PAUSE_SECONDS = 0.1
"""Between two looks at least, whatever ends meanwhile."""

CAUSE_SECONDS = 3.0
"""For the task that failed first, once another says that it lost a peer."""

REST_SECONDS = 15.0
"""For the servers and workers, once the leader has ended well."""

LOST = frozenset(128 + number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP))
"""Exit codes of a container whose task was killed from outside."""


STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}(?:Z|[+-]\d\d:\d\d) ")
"""What Podman puts before each part of a line that was written in several."""

PAUSED_SECONDS = 5.0
"""For a container that stands still, where another can be started instead."""


def verdict(
    job: JobFile, states: Sequence[TaskState], again: Mapping[str, int] = NEVER
) -> tuple[int, str] | None:
    """The job's exit code and who decided it; None while it goes on.

    The first task decides when it ends. Before that, so does one that failed for good, unless
    the engine starts it again and the others can do without it: only a lost worker beside
    parameter servers, and an evaluator, are such. A machine without the first task waits for
    all of its own. Then the code is 0 if one of them ended well, as a task does when the job
    ends: those that the others can do without may be lost.

    One that was lost before the first task had ended well, and started again after, came too
    late: its end is no failure.

    Where tasks are replaced, one that was killed ends the job when it was started again as often
    as it may be (``again`` says how often it was), and the others are too few without it.
    """
    if job.recovery is not None:
        return _of_recovering(job, states, again)
    leader, servers = job.leader, job.has_servers
    led = next((s for s in states if s.service == leader and s.ended and not s.code), None)
    failed = [s for s in states if s.ended and s.code and not (led and _came_late(s, led))]
    fatal = [s for s in failed if s.service == leader or not _is_dispensable(job, s, servers)]
    if fatal:
        return _blame(fatal)
    there = {state.service for state in states}
    missing = [name for name in job.services if name not in there]
    if missing:
        return EXIT_TASK_LOST, missing[0].replace("-", " ")
    for state in states:
        needed = not servers or leader in (None, state.service) or _role(job, state) == "evaluator"
        if needed and not state.ended:
            return None
    well = [state.name for state in states if state.ended and not state.code]
    return (0, well[0]) if well else _blame(failed)


def _of_recovering(
    job: JobFile, states: Sequence[TaskState], again: Mapping[str, int]
) -> tuple[int, str] | None:
    """As `verdict`, where tasks are replaced: all of them end together."""
    there = {state.service: state for state in states}
    missing = [name for name in job.tasks if name not in there]
    if missing:
        return EXIT_TASK_LOST, missing[0].replace("-", " ")
    tasks = [there[name] for name in job.tasks]
    well = [state.name for state in tasks if state.ended and not state.code]
    failed = [state for state in tasks if state.ended and state.code]
    if not well:
        lost = [s for s in failed if s.code in LOST]
        for_good = [s for s in lost if again.get(s.service, 0) >= job.restarts(s.service)]
        fatal = [s for s in failed if s.code not in LOST]
        recovery, spec = job.recovery, job.spec(job.tasks[0])
        least = None if recovery is None else recovery.min_workers
        count = len(tasks) if spec is None else spec.world_size
        if least is None or count - len(for_good) < least:
            fatal += for_good
        if fatal:
            return _blame(fatal)
        if len(for_good) < len(lost):
            return None  # they are started again
    if any(not state.ended for state in tasks):
        return None
    return (0, well[0]) if well else _blame(failed)


def _blame(failed: Sequence[TaskState]) -> tuple[int, str]:
    # Who lost a peer did not fail first, whatever the clock says.
    culprit = min(failed, key=lambda s: (s.code == EXIT_TASK_LOST, s.finished_at))
    return (EXIT_TASK_LOST if culprit.code in LOST else culprit.code), culprit.name


def _came_late(state: TaskState, led: TaskState) -> bool:
    """Whether one that was started again found nobody: the first task, ``led``, was done."""
    lost = state.code in LOST or state.code == EXIT_TASK_LOST
    return lost and state.starts > 1 and state.finished_at > led.finished_at


def _is_dispensable(job: JobFile, state: TaskState, servers: bool) -> bool:
    role = _role(job, state)
    beside = servers and role != "ps"
    return job.goes_on_without(state.service) and (beside or role == "evaluator")


def _role(job: JobFile, state: TaskState) -> str:
    spec = job.spec(state.service)
    return state.service.partition("-")[0] if spec is None else spec.task.type


@dataclass
class Watch:
    """Follows the containers of a job: what they print (unless ``silent``), and how they end."""

    engine: Engine
    job: JobFile
    only_now: bool = False
    silent: bool = False
    sink: Sink = field(default_factory=lambda: Sink.of(binary(sys.stdout)))
    _pen: threading.Lock = field(default_factory=threading.Lock)
    _news: threading.Event = field(default_factory=threading.Event)
    _readers: dict[str, threading.Event] = field(default_factory=dict)  # set when one ends
    _popens: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _last: dict[str, str] = field(default_factory=dict)
    _restarted: dict[str, int] = field(default_factory=dict)
    _again: dict[str, int] = field(default_factory=dict)  # how often we have started each again
    _paused: dict[str, float] = field(default_factory=dict)  # since when it stands still
    _unread: bool = False

    def follow(self) -> int:
        """Pass on what the tasks print until the job has ended; returns its exit code."""
        try:
            while True:
                self._news.clear()
                states = self.engine.states(self.job)
                self._report_restarts(states)
                found = verdict(self.job, states, self._again)
                if found is None and self.job.recovery is not None:
                    states = self._start_again(states)
                if found is not None:
                    return self._end(found)
                self.read(states)
                self._news.wait(LOOK_SECONDS)
                time.sleep(PAUSE_SECONDS)
        finally:
            self.stop()

    def read(self, states: Sequence[TaskState]) -> None:
        """Follow the output of each container that nobody follows, from where we stopped."""
        if self._unread or self.silent:
            return
        for index, state in enumerate(states):
            ended = self._readers.get(state.service)
            if ended is not None and (not ended.is_set() or state.status != "running"):
                continue
            self._start(state, index)

    def finish(self, limit: float | None) -> None:
        """Wait until all output has been read, at most ``limit`` seconds."""
        end = None if limit is None else time.monotonic() + limit
        # Not join: a signal handler that raises in it lets Python 3.11 take a thread for ended.
        for ended in list(self._readers.values()):
            ended.wait(None if end is None else max(0.0, end - time.monotonic()))

    def stop(self) -> None:
        """Follow nobody any more."""
        for popen in self._popens.values():
            popen.terminate()
            popen.wait()
        self.finish(LOOK_SECONDS)

    def _end(self, found: tuple[int, str]) -> int:
        """Wait for what belongs to the end: the first cause, the others' last words."""
        end = time.monotonic() + (REST_SECONDS if found[0] == 0 else CAUSE_SECONDS)
        while time.monotonic() < end:
            states = self.engine.states(self.job)
            self.read(states)
            found = verdict(self.job, states, self._again) or found
            tasks = [state for state in states if state.service in self.job.tasks]
            if all(state.ended for state in tasks) or found[0] not in (0, EXIT_TASK_LOST):
                break
            self._news.clear()
            self._news.wait(5 * PAUSE_SECONDS)
        self.finish(LOOK_SECONDS)
        code, name = found
        states = self.engine.states(self.job)
        if code:
            say(how_it_ended(self.job, states, name))
        else:
            for state in states:
                if state.service in self.job.tasks and not state.ended and state.starts > 1:
                    say(f"{state.name} came too late; the job has ended")
        return code

    def _start_again(self, states: list[TaskState]) -> list[TaskState]:
        """Start again what is lost; how all go then."""
        job, started = self.job, False
        is_over = any(s.ended and not s.code for s in states if s.service in job.tasks)
        for state in states:
            if self._stands(state):
                how = "stands still"
            elif state.ended and (state.code in LOST or state.service not in job.tasks):
                how = _how(job, state) if state.code else "has ended"
            else:
                continue
            count, most = self._again.get(state.service, 0) + 1, job.restarts(state.service)
            if is_over or (state.service in job.tasks and count > most):
                continue
            self._again[state.service], started = count, True
            self._paused.pop(state.service, None)
            of = f" ({count} of {most})" if most else ""
            say(f"{state.name} {how}; it is started again{of}")
            self.engine.start_again(state)
        return self.engine.states(job) if started else states

    def _stands(self, state: TaskState) -> bool:
        """Whether a container is paused for too long."""
        if state.status != "paused":
            self._paused.pop(state.service, None)
            return False
        now = time.monotonic()
        return now - self._paused.setdefault(state.service, now) >= PAUSED_SECONDS

    def _report_restarts(self, states: Sequence[TaskState]) -> None:
        for state in states:
            if state.starts > self._restarted.get(state.service, 1):
                self._restarted[state.service] = state.starts
                say(f"{state.name} ended and is started again")

    def _start(self, state: TaskState, index: int) -> None:
        words = [self.engine.docker, "logs", "--timestamps"]
        words += [] if self.only_now else ["--follow"]
        since = self._last.get(state.service)
        words += ["--since", since] if since else []
        popen = subprocess.Popen(
            [*words, state.id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours
        )
        self._popens[state.service] = popen
        if self._unread:  # since a moment ago
            popen.terminate()
        prefix = self.sink.prefix(state.name, index)
        ended = self._readers[state.service] = threading.Event()

        def read() -> None:
            try:
                self._pass_on(state.service, popen, prefix, since or "")
            finally:
                ended.set()
                self._news.set()

        threading.Thread(target=read, daemon=True).start()

    def _pass_on(
        self, service: str, popen: subprocess.Popen[bytes], prefix: bytes, since: str
    ) -> None:
        assert popen.stdout is not None
        with popen.stdout as lines:
            for line in lines:
                stamp, _, text = line.partition(b" ")
                at = stamp.decode(errors="replace")
                if at <= since:
                    continue  # read before the container was started again
                self._last[service] = at
                if self.engine.is_podman:
                    text = STAMP.sub(b"", text)
                with self._pen:
                    self._print(prefixed(prefix, text or b"\n"))
        popen.wait()

    def _print(self, line: bytes) -> None:
        try:
            self.sink.write([line])
        except BrokenPipeError:
            # Nobody reads us any more. The job goes on; what is left to print goes nowhere.
            self._unread = True
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.sink.stream.fileno())
            for popen in list(self._popens.values()):
                popen.terminate()


def how_it_ended(job: JobFile, states: Sequence[TaskState], name: str) -> str:
    """What a failed job has failed by: the task ``name``, as `verdict` says it."""
    lost = next((state for state in states if state.name == name), None)
    return f"{name} is gone" if lost is None or not lost.code else f"{name} {_how(job, lost)}"


def _how(job: JobFile, state: TaskState) -> str:
    """How a container that failed has ended."""
    if state.out_of_memory:
        limit = job.services[state.service].get("mem_limit")
        bound = f", its limit is {limit}: give it more by --memory" if limit else ""
        return f"ran out of memory{bound}"
    if state.code == EXIT_PREEMPTED:
        return "was told to end, and saved all"
    if state.code > 128:
        return f"was killed by signal {state.code - 128}"
    return f"failed with exit code {state.code}"
