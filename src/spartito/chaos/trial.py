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
from spartito.failpoints import ENV_STEP_HOOK
from spartito.launch.reaper import Reaper

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
class Run:
    """What is run, and what is done to it.

    Args:
        command: what starts the job.
        environment: of it.
        folder: of this run, for its log and its traces.
        out: the run folder of the job.
        schedule: the faults.
        sandbox: where it runs.
        limit: seconds until it is ended.
        sample: a file of the data, for ``corrupt``.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    out: Path
    schedule: Schedule
    sandbox: Sandbox
    limit: float
    sample: Path | None = None


def run(asked: Run, reaper: Reaper) -> Outcome:
    """Run it to its end, whatever comes.

    Args:
        asked: what.
        reaper: ends it when we are killed.

    Returns:
        How it ended; nothing of it runs any more.
    """
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAULTS).write_text(written(asked.schedule))
    before = frozenset(asked.sandbox.left())
    env = {
        **asked.environment,
        ENV: str(folder),
        ENV_STEP_HOOK: HOOK,
        "TMPDIR": str(asked.sandbox.temporary.resolve()),
    }
    with (folder / LOG).open("wb") as log:
        began = time.monotonic()
        popen = subprocess.Popen(
            [*asked.sandbox.enters, *asked.command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    reaper.watch([popen.pid])
    try:
        with _Injector(asked, folder, popen.pid) as injector:
            while popen.poll() is None and time.monotonic() < began + asked.limit:
                injector.look()
                time.sleep(POLL)
        ended = time.monotonic()
        code = popen.poll()
        left = [] if code is None else _left(folder, asked.sandbox, before)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        end_all(ENV, str(folder))
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


@dataclass
class _Injector(ExitStack):
    """Does the faults of a schedule that come from outside, each once its step is reached."""

    asked: Run
    folder: Path
    launcher: int
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
        pid = self.launcher
        if fault.task != LAUNCHER:
            pids = tasks_of(marked(ENV, str(self.folder)))
            if fault.task not in pids:
                return  # it has not started yet, or ends
            pid = pids[fault.task]
        injected = inject(fault.kind, Target(pid, self.asked.out, self.asked.sample))
        now = time.monotonic()
        fired(self.folder, self.done).write_text(f"{now:.6f}\n")
        self.done += 1
        self.callback(injected.heal)
        if injected.heal_after is not None:
            self.healing.append((now + injected.heal_after, injected))


def _times(folder: Path, faults: int) -> list[float]:
    paths = [fired(folder, number) for number in range(faults)]
    return [float(path.read_text()) for path in paths if path.exists()]


def _left(folder: Path, sandbox: Sandbox, before: frozenset[str]) -> list[str]:
    """What is there when the job has had time to clean up."""
    end = time.monotonic() + LAST
    while True:
        processes = [
            f"process {one.pid} ({one.task or '?'}, {one.state})"
            for one in marked(ENV, str(folder))
        ]
        files = sandbox.left(before)
        if not processes + files or time.monotonic() > end:
            return processes + files
        time.sleep(0.05)
