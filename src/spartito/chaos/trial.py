"""One run of a job with faults: start it, do them when they are due, and see how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from spartito.chaos.inject import Injected, Target, inject
from spartito.chaos.inside import ENV, FAULTS, fired
from spartito.chaos.processes import end_all, marked, tasks_of
from spartito.chaos.sandbox import Sandbox
from spartito.chaos.schedule import KINDS, LAUNCHER, Fault, Schedule, written
from spartito.chaos.traces import Traces, reached, read_traces
from spartito.errors import EXIT_TASK_LOST
from spartito.failpoints import ENV_STEP_HOOK
from spartito.launch.processes.fork_server import ForkServer
from spartito.launch.processes.interrupts import interrupts_held
from spartito.launch.processes.process import Child
from spartito.launch.processes.reaper import Reaper

LOG = "log"
HOOK = "spartito.chaos.inside:attach"
POLL = 0.003
LAST = 8.0
"""Seconds in which what the job started has to be gone once it has ended."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, as it looked from outside.

    Args:
        code: the exit code; None: it did not end within the limit, and we ended it.
        seconds: from its start to its end.
        ended: its end, by the machine's monotonic clock.
        fired: when each fault happened, those that did.
        text: all that it printed.
        traces: the steps of its tasks.
        left: processes and files that it left.
    """

    code: int | None
    seconds: float
    ended: float
    fired: tuple[float, ...]
    text: str
    traces: Traces
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """One command of a job: all of it, or what runs on one of several machines.

    Args:
        command: what starts it.
        environment: of it.
        sandbox: where it runs.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    sandbox: Sandbox


@dataclass(frozen=True, slots=True)
class Run:
    """What is run, and what is done to it.

    Args:
        starts: the commands of the job, by the task whose machine it is; `LAUNCHER`: all of it.
        folder: of this run, for its log and its traces.
        out: the run folder of the job.
        schedule: the faults.
        limit: seconds until it is ended.
        sample: a file of the data, for ``corrupt``.
    """

    starts: Mapping[str, Start]
    folder: Path
    out: Path
    schedule: Schedule
    limit: float
    sample: Path | None = None

    @property
    def sandboxes(self) -> list[Sandbox]:
        """Where it runs, each once."""
        return list({id(one.sandbox): one.sandbox for one in self.starts.values()}.values())


def run(asked: Run, reaper: Reaper, server: ForkServer | None = None) -> Outcome:
    """Run it to its end, whatever comes.

    Args:
        asked: what.
        reaper: ends it when we are killed.
        server: what starts it, where there is one.

    Returns:
        How it ended; nothing of it runs any more.
    """
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAULTS).write_text(written(asked.schedule))
    before = frozenset(_files(asked.sandboxes))
    began = time.monotonic()
    popens: dict[str, Child] = {}
    try:
        for name, start in asked.starts.items():
            with interrupts_held():  # nothing runs that we do not know of
                popens[name] = _begin(start, folder, reaper, server)
                reaper.watch([popen.pid for popen in popens.values()])
        with _Injector(asked, folder, popens) as injector:
            while time.monotonic() < began + asked.limit:
                if None not in [popen.poll() for popen in popens.values()]:
                    break
                injector.look()
                time.sleep(POLL)
        ended = time.monotonic()
        code = _code([popen.poll() for popen in popens.values()])
        left = [] if code is None else _left(folder, asked.sandboxes, before)
    finally:
        for popen in popens.values():
            with suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
        end_all(folder)
        for popen in popens.values():
            popen.wait()
        reaper.watch([])
    return Outcome(
        code,
        ended - began,
        ended,
        tuple(_times(folder, len(asked.schedule))),
        (folder / LOG).read_text(errors="replace"),
        read_traces(folder),
        tuple(left),
    )


def _begin(start: Start, folder: Path, reaper: Reaper, server: ForkServer | None) -> Child:
    env = {
        **start.environment,
        ENV: str(folder),
        ENV_STEP_HOOK: HOOK,
        "TMPDIR": str(start.sandbox.temporary.resolve()),
    }
    words = [*start.sandbox.enters, *start.command]
    with (folder / LOG).open("ab") as log, open(os.devnull, "rb") as nothing:
        files = [nothing.fileno(), log.fileno(), log.fileno()]
        forked = server.start(words, env, reaper.pipe, files, launches=True) if server else None
        return forked or subprocess.Popen(
            words,
            env=env,
            stdin=nothing,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _code(codes: Sequence[int | None]) -> int | None:
    """The exit code of a job of several commands: None while one runs, 69 before others."""
    known = [code for code in codes if code is not None]
    if len(known) < len(codes):
        return None
    return EXIT_TASK_LOST if EXIT_TASK_LOST in known else next(filter(None, known), 0)


@dataclass
class _Injector(ExitStack):
    """Does the faults of a schedule that come from outside, each once its step is reached."""

    asked: Run
    folder: Path
    started: Mapping[str, Child]
    done: int = 0
    healing: list[tuple[float, Injected]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def look(self) -> None:
        """Do and take back what is due."""
        now = time.monotonic()
        for at, injected in [one for one in self.healing if one[0] <= now]:
            injected.heal()
            self.healing.remove((at, injected))
        if self.done == len(self.asked.schedule):
            return
        fault = self.asked.schedule[self.done]
        if KINDS[fault.kind].inside:
            self.done += fired(self.folder, self.done).exists()
        elif reached(self.folder) >= fault.step:
            self._do(fault)

    def _do(self, fault: Fault) -> None:
        found = {name: popen.pid for name, popen in self.started.items()}
        if fault.task != LAUNCHER:
            found |= tasks_of(marked(self.folder))
        if fault.task not in found:
            return  # it has not started yet, or ends
        start = self.asked.starts.get(fault.task)
        machine = None if start is None else start.sandbox.machine
        target = Target(found[fault.task], self.asked.out, self.asked.sample, machine)
        injected = inject(fault.kind, target)
        now = time.monotonic()
        fired(self.folder, self.done).write_text(f"{now:.6f}\n")
        self.done += 1
        self.callback(injected.heal)
        if injected.heal_after is not None:
            self.healing.append((now + injected.heal_after, injected))


def _times(folder: Path, faults: int) -> list[float]:
    paths = [fired(folder, number) for number in range(faults)]
    return [float(path.read_text()) for path in paths if path.exists()]


def _files(sandboxes: Sequence[Sandbox]) -> list[str]:
    return [name for sandbox in sandboxes for name in sandbox.left()]


def _left(folder: Path, sandboxes: Sequence[Sandbox], before: frozenset[str]) -> list[str]:
    """What is there when the job has had time to clean up."""
    end = time.monotonic() + LAST
    while True:
        processes = [
            f"process {one.pid} ({one.task or '?'}, {one.state})" for one in marked(folder)
        ]
        files = sorted(set(_files(sandboxes)) - before)
        if not processes + files or time.monotonic() > end:
            return processes + files
        time.sleep(0.05)
