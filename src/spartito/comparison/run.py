"""Train one job under several strategies, one after the other, and lay them side by side."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any, BinaryIO, Protocol

from spartito.cluster.resolver import check_alone
from spartito.comparison.containers import ContainerRunner
from spartito.comparison.load import load_between, read_load
from spartito.comparison.plan import ENV_THREADS, Launch, Plan, Planned
from spartito.errors import UserError
from spartito.folders import hold, release
from spartito.launch.lines.job import machines_on
from spartito.launch.processes.fork_server import ForkServer, new_server
from spartito.launch.processes.interrupts import ENDING
from spartito.launch.processes.local import replica_environment
from spartito.launch.processes.output import LineCutter, binary
from spartito.launch.processes.pause import pausing
from spartito.launch.processes.process import Child
from spartito.launch.processes.reaper import Reaper
from spartito.launch.processes.roles import Roles
from spartito.names import ENV_EPOCHS, ENV_RUN_DIR, ENV_STRATEGY, ENV_STRATEGY_OPTIONS, nearest
from spartito.notes import say
from spartito.system import PROC, machine_memory
from spartito.system.capacity import available_cores
from spartito.system.texts import text_of

NOT_INHERITED = ("TF_CONFIG", ENV_STRATEGY, ENV_STRATEGY_OPTIONS, ENV_RUN_DIR, ENV_EPOCHS)
"""Variables that say who we are and how to train: each run has its own."""

KEPT_LINES = 15
"""Lines of a failed run's stderr that its row shows."""

ALL_DIVERGED = 3
"""The exit code where every run diverged: none failed, and none can be chosen."""

READ_SIZE = 1 << 16
LAST_WORDS = 5.0
"""Seconds for the output of a run that has ended."""

NO_HISTORY = (
    "it ended well, but left no history: only a Trainer writes one, into the folder that "
    f"{ENV_RUN_DIR} names (do not give it another run_dir)"
)


class Runner(Protocol):
    """What starts the runs: as processes here, or in containers."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the runs had, beside the machine."""

    def prepare(self, planned: Planned) -> Launch:
        """Make ready what the run needs, and say how it is started."""


@dataclass(frozen=True, slots=True)
class ProcessRunner:
    """Starts runs as processes of this machine."""

    plan: Plan

    @property
    def facts(self) -> Mapping[str, Any]:
        """Nothing: they have the machine."""
        return {}

    def prepare(self, planned: Planned) -> Launch:
        """As `Runner.prepare`: ``spartito run``."""
        folder = (self.plan.out / planned.folder).resolve()
        own = {ENV_RUN_DIR: str(folder), **self.plan.environment}
        if planned.threads is not None:
            own[ENV_THREADS] = str(planned.threads)
        return Launch(command(self.plan, planned), own)


def compare_strategies(plan: Plan, env: Mapping[str, str] | None = None) -> int:
    """Run all of ``plan`` in its order; returns the exit code.

    ``compare.json`` is written after every run, ``compare.html`` at the end. 0 when all went
    well, 1 when a run failed or did not finish (the others are run all the same), 3 when all
    diverged, 128 + n when signal n stopped us. Raises `UserError` when the goal names a figure
    that no run reports: after the first run, whose results are kept; and before the first one
    for containers that cannot be, and in a process that is one of several tasks. Must be called
    from the main thread.
    """
    variables = os.environ if env is None else env
    check_alone(variables, "spartito compare")
    base = {name: value for name, value in variables.items() if name not in NOT_INHERITED}
    runner: Runner = ProcessRunner(plan)
    if plan.containers:
        runner = ContainerRunner.of(plan, plan.containers)
    if plan.link:
        with machines_on(plan.link, Roles(1)):  # what cannot be is said before the first run
            pass
    results = _Results(plan, runner)
    for why in plan.left_out:
        say(why)
    hold(plan.out, "comparisons", plan)
    reaper, server = Reaper(), _fork_server(plan, base)
    try:
        with _Stop().handled() as stop:
            if server is not None and not server.wait(lambda: stop.number is not None):
                server.close()
                server = None
            for number, planned in enumerate(plan.runs, start=1):
                if stop.number is not None:
                    break
                say(f"run {number} of {len(plan.runs)}: {planned}")
                results.add(planned, _run(runner, planned, base, reaper, stop, server))
                results.check_goal()
            results.show()
    finally:
        if server is not None:
            server.close()
        reaper.close()
        release(plan)
    if stop.number is not None:
        say(f"stopped by {stop.number.name} after {len(results.runs)} of {len(plan.runs)} runs")
        return 128 + stop.number
    return results.exit_code


@dataclass
class _Stop:
    """The signal that shall end all, passed on to the run that is under way."""

    number: signal.Signals | None = None
    running: Child | None = None

    @contextmanager
    def handled(self) -> Iterator[_Stop]:
        """Listen to signals inside of the block."""
        ours = [n for n in ENDING if signal.getsignal(n) != signal.SIG_IGN]  # nohup
        old = {number: signal.signal(number, self._hear) for number in ours}
        try:
            with pausing(self._pause, self._go_on):
                yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def watch(self, run: Child | None) -> None:
        """From now on signals go to ``run``, one that came before it too."""
        self.running = run
        if run is not None and self.number is not None:
            self._send(self.number)

    def _pause(self) -> None:
        self._send(signal.SIGTSTP)

    def _go_on(self) -> None:
        self._send(signal.SIGCONT)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or signal.Signals(number)
        self._send(number)

    def _send(self, number: int) -> None:
        if self.running is not None:
            with suppress(ProcessLookupError):
                self.running.send_signal(number)


@dataclass
class _Results:
    """The results so far, written out with each that comes."""

    plan: Plan
    runner: Runner
    runs: list[dict[str, Any]] = field(default_factory=list)
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))

    @property
    def exit_code(self) -> int:
        """1 when a run failed or did not finish, 3 when none did and all diverged."""
        from spartito.comparison.report.outcome import DIVERGED, FAILED, UNFINISHED

        states = self._states()
        if not {FAILED, UNFINISHED}.isdisjoint(states):
            return 1
        return ALL_DIVERGED if states and set(states) == {DIVERGED} else 0

    def _states(self) -> list[str]:
        """How each run ended."""
        from spartito.comparison.report.results import comparison

        return [
            comparison({**self.record, "runs": [run]}).all_runs[0].ended.state for run in self.runs
        ]

    @property
    def record(self) -> dict[str, Any]:
        """What ``compare.json`` says, but for the sentences."""
        plan = self.plan
        goal = plan.goal and {"name": plan.goal[0], "value": plan.goal[1]}
        return {
            "target": plan.program.title,
            "arguments": list(plan.program.arguments),
            "started": self.started,
            "planned": len(plan.runs),
            "goal": goal,
            "link": plan.link and plan.link.spoken,
            "line": plan.link and str(plan.link),
            "machine": machine_facts() | dict(self.runner.facts),
            "runs": self.runs,
        }

    def add(self, planned: Planned, ended: Mapping[str, Any]) -> None:
        """Read what the run left in its folder, and write it all down."""
        # Imported here: a launcher starts at once, and this brings half the package.
        from spartito.comparison.report.page import write_comparison
        from spartito.comparison.report.results import read_result

        result = read_result(self.plan.out / planned.folder)
        error = ended["error"]
        if error is None and not result["history"]:
            error = NO_HISTORY
        fit = result["config"].get("fit") or {}
        self.runs.append(
            {
                "strategy": str(planned.strategy),
                "workers": planned.workers,
                "ps": planned.ps,
                "threads": planned.threads,
                "batch_size": planned.batch_size or fit.get("batch_size"),
                "sweep": planned.sweep,
                "slow": {task.replace(":", " "): part for task, part in planned.slow.items()},
                **result,
                **ended,
                "error": error,
                "run": planned.folder,
                "setting": planned.setting,
                "repeat": planned.repeat,
            }
        )
        write_comparison(self.plan.out, self.record)

    def check_goal(self) -> None:
        """Stop at the first run that ended well and does not know the goal's figure."""
        run = self.runs[-1]
        if self.plan.goal is None or run["error"] is not None:
            return
        there = {name for epoch in run["history"] for name in epoch}
        name = self.plan.goal[0]
        if name not in there:
            self.show()
            raise UserError(f"--goal: no run reports {name!r}", nearest(name, there))

    def show(self) -> None:
        """The page, and on the terminal the table and what it says."""
        if not self.runs:
            return
        from spartito.comparison.report.choose import sentences
        from spartito.comparison.report.page import write_comparison_page
        from spartito.comparison.report.results import comparison
        from spartito.comparison.report.table import table

        found = comparison(self.record)
        page = write_comparison_page(self.plan.out)
        print(f"\n{table(found)}\n", *sentences(found), f"\ncomparison {page}", sep="\n")
        sys.stdout.flush()
        from spartito.comparison.report.outcome import DONE, VERBS

        for state, runs in _by_state(self.runs, self._states()).items():
            if state != DONE:
                say(f"{len(runs)} of {len(self.runs)} runs {VERBS[state]}: {', '.join(runs)}")


def _by_state(runs: Sequence[Mapping[str, Any]], states: Sequence[str]) -> dict[str, list[str]]:
    """The names of the runs by how they ended."""
    found: dict[str, list[str]] = {}
    for run, state in zip(runs, states, strict=True):
        found.setdefault(state, []).append(run["run"])
    return found


def command(plan: Plan, planned: Planned) -> list[str]:
    """What starts the run ``planned``, as a user would type it."""
    words = [sys.executable, "-m", "spartito", "run", "--no-config"]
    words += [f"--strategy={planned.strategy}", f"--workers={planned.workers}"]
    words += [f"--ps={planned.ps}"] if planned.ps else []
    words += [f"--link={plan.link}"] if plan.link else []
    words += [f"--slow={task}={fraction}" for task, fraction in planned.slow.items()]
    out = str(plan.out / planned.folder)
    return [*words, *plan.program_of(planned).argv(out=out, data=plan.data)]


def machine_facts() -> dict[str, Any]:
    """What the runs had to share: cores, processor, memory in bytes, system."""
    facts = {
        "cores": available_cores(),
        "cpu": _processor(),
        "memory": machine_memory().get("MemTotal"),
    }
    facts |= {"system": platform.system(), "python": platform.python_version()}
    return {name: value for name, value in facts.items() if value}


def _fork_server(plan: Plan, base: Mapping[str, str]) -> ForkServer | None:
    """What all runs are forked from, where several have their tasks among our processes."""
    if plan.containers or plan.link or len(plan.runs) == 1:
        return None
    workers = max(planned.workers for planned in plan.runs)
    return new_server(replica_environment(base, workers))


def _run(
    runner: Runner,
    planned: Planned,
    base: Mapping[str, str],
    reaper: Reaper,
    stop: _Stop,
    server: ForkServer | None,
) -> dict[str, Any]:
    """One run from its start to its end: seconds, exit code, and its error if it failed."""
    launch = runner.prepare(planned)
    env = {**base, **launch.environment}
    began, before = time.monotonic(), read_load()
    forked = server.start(launch.command, env, reaper.pipe, launches=True) if server else None
    popen: Child = forked or subprocess.Popen(
        launch.command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,  # signals reach it through us, once
    )
    reaper.watch([popen.pid])
    stop.watch(popen)
    last: deque[bytes] = deque(maxlen=KEPT_LINES)
    readers = [
        threading.Thread(target=_pass_on, args=(source, ours, kept), daemon=True)
        for source, ours, kept in (
            (popen.stdout, binary(sys.stdout), last if launch.mixed else deque(maxlen=0)),
            (popen.stderr, binary(sys.stderr), last),
        )
    ]
    for reader in readers:
        reader.start()
    code = popen.wait()
    stop.watch(None)
    reaper.watch([])
    for reader in readers:
        reader.join(LAST_WORDS)
    error = None
    if code != 0:
        said = b"".join(list(last)).decode(errors="replace").strip()
        error = said or f"it ended with exit code {code} and said nothing"
    found = {"seconds": time.monotonic() - began, "exit_code": code, "error": error}
    # What containers compute is not counted as ours: who else was busy cannot be told there.
    load = None if launch.mixed else load_between(before, read_load())
    return found if load is None else {**found, "load": load.record()}


def _pass_on(source: IO[bytes], ours: BinaryIO, kept: deque[bytes]) -> None:
    """Print whole lines as they come, and keep the last ones."""
    cutter = LineCutter()
    while data := source.read(READ_SIZE):
        _write(cutter.feed(data), ours, kept)
        if (bar := cutter.bar()) is not None:
            _write([b"\r" + bar], ours)
    _write(cutter.finish(), ours, kept)
    source.close()


def _write(lines: Sequence[bytes], ours: BinaryIO, kept: deque[bytes] | None = None) -> None:
    if kept is not None:
        kept.extend(lines)
    with suppress(OSError):  # nobody reads us any more, or the disk is full; results are files
        ours.writelines(lines)
        ours.flush()


def _processor() -> str:
    lines = text_of(PROC / "cpuinfo").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
