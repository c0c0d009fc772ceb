"""Runs of one job under several strategies with one fault each, and what came of them."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from spartito.chaos.inside import FAULTS
from spartito.chaos.judge import Record, Setup, Verdict, judge
from spartito.chaos.machines import machines_for, on_machines
from spartito.chaos.sandbox import Sandbox, sandbox
from spartito.chaos.schedule import (
    KINDS,
    LAUNCHER,
    Fault,
    Schedule,
    drawn,
    matched,
    needs_network,
    written,
)
from spartito.chaos.spare_data import spare_data
from spartito.chaos.traces import read_traces
from spartito.chaos.trial import LOG, Outcome, Run, Start, run
from spartito.declared import Declared, parse_all
from spartito.errors import UserError
from spartito.folders import make_folder
from spartito.launch.job import Heading, Program, option
from spartito.launch.lines.network import NoNamespacesError
from spartito.launch.processes.fork_server import ForkServer, new_server
from spartito.launch.processes.local import replica_environment
from spartito.launch.processes.reaper import Reaper
from spartito.launch.processes.roles import Roles
from spartito.names import ENV_RUN_DIR, ENV_STRATEGY, ENV_STRATEGY_OPTIONS, ENV_TIMEOUT, nearest
from spartito.registry import StrategyInfo, names_anywhere, strategy_info
from spartito.storage.own_files import begins_with, check_own

NOT_INHERITED = ("TF_CONFIG", "RANK", "WORLD_SIZE", ENV_STRATEGY, ENV_STRATEGY_OPTIONS, ENV_RUN_DIR)
RESULTS, ENDED, OUT = "results.jsonl", "ended.json", "run"
GOES_ON_AT_MOST = 3
"""Runs that may go on from one that a fault ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What is run.

    Args:
        program: the job's.
        strategies: under which.
        workers: the tasks that compute.
        ps: the parameter servers, where a strategy has them.
        chief: whether a task of its own is the chief there.
        evaluator: whether there is an evaluator.
        words: more options of ``spartito run``.
        kinds: the kinds of faults.
        roles: whom they happen to.
        schedules: the faults themselves; empty: each kind once for each role, or by ``rounds``.
        seed: of what is drawn.
        rounds: how many are drawn for each strategy; None: every one of them.
        steps: when; None: in the middle of what the job does without faults.
        limit: seconds in which a task that stands still has to be named.
        slack: seconds that a job may take longer than promised.
        longest: seconds of one run.
        minutes: after which no further run with a fault begins; None: no limit.
        sample: a file of the data, for ``corrupt``.
        data: the folder with a recipe's data, or its URL.
        out: the folder to write.
    """

    program: Program
    strategies: Sequence[Declared]
    workers: int = option("Tasks that compute.", 2, least=1)
    ps: int = option("Parameter servers, where a strategy has them.", 2, least=1)
    chief: bool = Heading.WORKERS.option("With servers: a chief that does not compute.", False)
    evaluator: bool = Heading.WORKERS.option("A task that evaluates each checkpoint.", False)
    words: Sequence[str] = ()
    kinds: Sequence[str] = tuple(KINDS)
    roles: Sequence[str] = ("worker", "chief", "ps", "evaluator", "launcher")
    schedules: Sequence[Schedule] = ()
    seed: int = Heading.FAULTS.option("What is drawn by chance.", 0)
    rounds: int | None = option(
        "Faults drawn for each strategy; each one of them by default.", least=1
    )
    steps: range | None = None
    limit: int = Heading.FAULTS.option(
        "Seconds until a task that stands still is named.", 10, least=1
    )
    slack: int = Heading.FAULTS.option(
        "Seconds more than promised that a machine with other work may take.", 0, least=0
    )
    longest: int = Heading.FAULTS.option(
        "Seconds after which a run counts as one that hangs.", 120, least=10
    )
    minutes: float | None = Heading.FAULTS.option(
        "Begin no further fault after so long; the next call does the rest.", metavar="MINUTES"
    )
    sample: Path | None = Heading.FAULTS.option(
        "A file of the data, which corrupt overwrites for a while.", metavar="FILE"
    )
    data: str | None = None
    out: Path = Path("runs/chaos")

    def __post_init__(self) -> None:
        matched(self.kinds, ())
        for role in self.roles:
            if role not in Suite.roles_known():
                raise UserError(f"{role!r} is not a role", nearest(role, Suite.roles_known()))
        if self.sample is not None and not self.sample.is_file():
            raise UserError(f"--sample {self.sample} is no file", "Name one file of the data.")
        infos = [strategy_info(strategy.name) for strategy in self.strategies]
        known = {LAUNCHER, *(task for info in infos for task in self.all_tasks(info))}
        for fault in (fault for schedule in self.schedules for fault in schedule):
            if fault.task not in known:
                raise UserError(
                    f"--schedule {fault}: the job has no {fault.task}", nearest(fault.task, known)
                )

    @staticmethod
    def roles_known() -> tuple[str, ...]:
        """The roles, as people write them."""
        return ("worker", "chief", "ps", "evaluator", "launcher")

    @property
    def networks(self) -> set[bool]:
        """Whether faults are asked for that need a network, and whether others are."""
        if self.schedules:
            return set(map(needs_network, self.schedules))
        return {KINDS[kind].network for kind in self.kinds}

    def all_tasks(self, info: StrategyInfo) -> list[str]:
        """Every task of the job under one strategy."""
        served = info.needs_servers
        counts = {
            "chief": int(self.chief and served),
            "worker": min(self.workers, info.most_replicas or self.workers),
            "ps": self.ps if served else 0,
            "evaluator": int(self.evaluator),
        }
        return [f"{role}:{index}" for role, count in counts.items() for index in range(count)]

    def tasks(self, info: StrategyInfo) -> dict[str, str]:
        """The task of each role to which faults happen, under one strategy."""
        workers = min(self.workers, info.most_replicas or self.workers)
        apart = info.needs_servers and self.chief
        found = {"chief": "chief:0" if apart else "worker:0", "launcher": "launcher"}
        if workers > 1 or apart:
            found["worker"] = f"worker:{workers - 1}"
        if info.needs_servers:
            found["ps"] = "ps:0"
        if self.evaluator:
            found["evaluator"] = "evaluator:0"
        return {role: found[role] for role in self.roles if role in found}


def survive(suite: Suite) -> int:
    """Run all of it; cells that the folder has results of are not run again.

    Args:
        suite: what.

    Returns:
        0 when all promises were kept, else 1.

    Raises:
        UserError: the job does not run without faults either.
    """
    make_folder(suite.out, "--out")
    check_own(suite.out, {RESULTS: begins_with('{"strategy": ')})
    end = math.inf if suite.minutes is None else time.monotonic() + 60 * suite.minutes
    reaper, server = Reaper(), new_server(replica_environment(os.environ, suite.workers))
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with (
            spare_data(suite.program.arguments, suite.data, suite.sample, suite.out) as spare,
            sandbox(suite.out / "temporary") as where,
        ):
            program = replace(suite.program, arguments=spare.arguments)
            suite = replace(suite, program=program, data=spare.data, sample=spare.sample)
            if server is not None:
                server.wait()
            for strategy in suite.strategies:
                under = _Under(suite, strategy, where, reaper, server, end)
                under.all_cells()
                under.all_cells_of_network()
    finally:
        signal.signal(signal.SIGTERM, before)
        if server is not None:
            server.close()
        reaper.close()
    results = read_results(suite.out)
    broken = [result for result in results if result["broken"]]
    _say(f"{len(results) - len(broken)} of {len(results)} cells end as promised")
    return int(bool(broken))


def read_results(out: Path) -> list[dict[str, Any]]:
    """The cells that a folder has results of, each with its verdict.

    Args:
        out: the folder of a suite.

    Returns:
        One for each cell, in the order in which they ran.
    """
    path = out / RESULTS
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.strip()]


@dataclass(frozen=True, slots=True)
class _Under:
    """The cells of one strategy."""

    suite: Suite
    strategy: Declared
    sandbox: Sandbox
    reaper: Reaper
    server: ForkServer | None
    end: float
    machines: Mapping[str, Sandbox] = field(default_factory=dict)

    @property
    def info(self) -> StrategyInfo:
        return strategy_info(self.strategy.name)

    @property
    def folder(self) -> Path:
        return self.suite.out / (self.strategy.slug + ("-machines" if self.machines else ""))

    @property
    def workers(self) -> int:
        return min(self.suite.workers, self.info.most_replicas or self.suite.workers)

    @property
    def setup(self) -> Setup:
        words = " ".join(self.suite.words)
        return Setup(
            self.info.name,
            self.info.asynchronous,
            self.info.needs_servers,
            "--recover" in words,
            self.suite.limit,
            self.suite.slack,
        )

    def all_cells(self) -> None:
        """Run those that have no result yet."""
        suite, network = self.suite, bool(self.machines)
        if network not in suite.networks or time.monotonic() > self.end:
            return
        done = {(one["strategy"], one["schedule"]) for one in read_results(suite.out)}
        reference = self._reference()
        for schedule in self._schedules(reference):
            text = written(schedule)
            if (str(self.strategy), text) not in done and time.monotonic() < self.end:
                verdict = self._cell(schedule, reference)
                self._keep(text, verdict)

    def all_cells_of_network(self) -> None:
        """The same for faults that need a machine for each task, where they can be made."""
        suite, info = self.suite, self.info
        if True not in suite.networks or info.one_machine or suite.rounds is not None:
            return
        tasks = [task for task in suite.all_tasks(info) if task != LAUNCHER]
        try:
            with machines_for(tasks, suite.out / "temporary") as machines:
                replace(self, machines=machines).all_cells()
        except NoNamespacesError as error:
            _say(f"{self.strategy}: no faults of the network: {error}")

    def _keep(self, text: str, verdict: Verdict) -> None:
        known = {"strategy": str(self.strategy), "schedule": text, "seed": self.suite.seed}
        with (self.suite.out / RESULTS).open("a") as file:
            file.write(json.dumps({**known, **asdict(verdict)}) + "\n")
        ended = f"ended with {verdict.code}, {verdict.seconds:.1f} s"
        again = f", started again {verdict.restarts} times" if verdict.restarts else ""
        broken = "".join(f"\n    {why}" for why in verdict.broken)
        word = "BROKEN" if verdict.broken else "as promised"
        _say(f"{self.strategy} {text}: {word}: {ended}{again}{broken}")

    def _reference(self) -> Record:
        """The run without faults, which the folder may have already."""
        folder = self.folder / "reference"
        if (folder / ENDED).exists():
            facts = json.loads((folder / ENDED).read_text())
            text = (folder / LOG).read_text(errors="replace")
            old = Outcome(**facts, fired=(), text=text, traces=read_traces(folder), left=())
            return Record((old,), read_history(folder / OUT), read_applied(folder / OUT))
        _say(f"{self.strategy} without faults")
        outcome = self._run(folder, ())
        if outcome.code != 0:
            raise UserError(
                f"under {self.strategy} the job ends with {outcome.code} without any fault:\n"
                + "\n".join(outcome.text.splitlines()[-5:]),
                f"All that it printed is in {folder / LOG}.",
            )
        if not outcome.traces:
            raise UserError(
                "the job made no step of a Trainer's fit", "Only fit tells which step it is in."
            )
        facts = {"code": 0, "seconds": outcome.seconds, "ended": outcome.ended}
        (folder / ENDED).write_text(json.dumps(facts))
        return Record((outcome,), read_history(folder / OUT), read_applied(folder / OUT))

    def _schedules(self, reference: Record) -> list[Schedule]:
        suite, tasks = self.suite, self.suite.tasks(self.info)
        if suite.schedules:
            return [one for one in suite.schedules if needs_network(one) == bool(self.machines)]
        last = max(step.number for step in reference.steps())
        steps = suite.steps or range(last * 2 // 5, last * 3 // 5 + 1)
        late = suite.steps or range(last * 7 // 10, last * 9 // 10 + 1)  # an older one is there
        kinds = [
            kind
            for kind in suite.kinds
            if KINDS[kind].network == bool(self.machines) and (kind != "corrupt" or suite.sample)
        ]
        if suite.rounds is not None and kinds:
            return drawn(suite.seed, suite.rounds, kinds, list(tasks.values()), steps)
        found: list[Schedule] = []
        for kind, task in dict.fromkeys(matched(kinds, tasks.values())):
            if task == "chief:0" and KINDS[kind].inside:
                continue  # a chief apart makes no steps
            draw = random.Random(f"{suite.seed}/{self.strategy}/{kind}/{task}")
            when = late if kind == "torn" else steps
            found.append((Fault(kind, task, draw.choice(when)),))
        return found

    def _cell(self, schedule: Schedule, reference: Record) -> Verdict:
        folder = self.folder / written(schedule).replace("#", "-").replace(":", "-")
        _clear(folder)
        outcomes = [self._run(folder, schedule)]
        while outcomes[-1].code != 0 and len(outcomes) <= GOES_ON_AT_MOST:
            again = self._run(folder, (), len(outcomes))
            outcomes.append(again)
            if again.code not in (0, 69, 75):
                break
        out = folder / OUT
        record = Record(tuple(outcomes), read_history(out), read_applied(out))
        return judge(schedule, self.setup, reference, record)

    def _run(self, folder: Path, schedule: Schedule, times: int = 0) -> Outcome:
        suite = self.suite
        out = (folder / OUT).resolve()
        program = suite.program
        saved = (*out.glob("checkpoints/*/manifest.json"), *out.glob("backup/*/*/manifest.json"))
        if program.kind == "recipe" and saved:
            program = replace(program, arguments=(*program.arguments, "--resume"))
        inherited = {name: v for name, v in os.environ.items() if name not in NOT_INHERITED}
        env = {ENV_TIMEOUT: f"{suite.limit:g}", **inherited, ENV_RUN_DIR: str(out)}
        words = program.argv(out=str(out), data=suite.data)
        where = folder / f"again-{times}" if times else folder
        asked = Run(self._starts(words, env), where, out, schedule, suite.longest, suite.sample)
        return run(asked, self.reaper, self.server)

    def _starts(self, words: Sequence[str], env: Mapping[str, str]) -> dict[str, Start]:
        suite, info = self.suite, self.info
        roles = Roles(self.workers, suite.ps if info.needs_servers else 0, suite.evaluator,
                      suite.chief and info.needs_servers)  # fmt: skip
        own = [sys.executable, "-m", "spartito", "run", "--no-config", "--yes"]
        own += [f"--strategy={self.strategy}"]
        own += suite.words
        if self.machines:
            return on_machines([*own, *words], env, roles, self.machines)
        counts = [f"--workers={roles.workers}", *(roles.asked.split())]
        return {LAUNCHER: Start([*own, *counts, *words], env, self.sandbox)}


def _clear(folder: Path) -> None:
    """Remove the folder of a cell of a suite that was interrupted; no other folder."""
    if folder.exists() and any(folder.iterdir()) and not (folder / FAULTS).is_file():
        raise UserError(
            f"{folder} was not written by Spartito, and would be removed", "Name another --out."
        )
    shutil.rmtree(folder, ignore_errors=True)


def read_history(out: Path) -> list[Mapping[str, Any]]:
    """The lines of a run folder's history.

    Args:
        out: the run folder.

    Returns:
        One for each epoch; what cannot be read is left out.
    """
    path = out / "history.jsonl"
    return list(_readable(path.read_text(errors="replace"))) if path.exists() else []


def read_applied(out: Path) -> dict[str, int]:
    """How many pushes each server of a run applied.

    Args:
        out: the run folder.

    Returns:
        The number by server; empty for a run without any.
    """
    found = {path.stem: json.loads(path.read_text()) for path in out.glob("tasks/ps-*.json")}
    return {name: facts["work_items"] for name, facts in sorted(found.items())}


def _readable(text: str) -> Iterator[Mapping[str, Any]]:
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def chosen_strategies(text: str) -> list[Declared]:
    """The strategies that ``--strategy`` names: some with commas, or all."""
    if text.strip() == "all":
        return [Declared(name) for name in names_anywhere()]
    return parse_all(text, "--strategy")


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(f"spartito: {time.strftime('%H:%M:%S')} {text}", flush=True)
