"""Which runs a comparison has: what the user typed is checked before anything starts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from spartito.declared import Declared, parse_all
from spartito.errors import UserError
from spartito.folders import LOCK
from spartito.launch.containers.launcher import Compose
from spartito.launch.job import Heading, Program, option
from spartito.launch.lines.line import Link
from spartito.launch.processes.throttle import FULL, slow_tasks
from spartito.launch.target import check_program
from spartito.names import ENV_EPOCHS, RECIPE_SEED, nearest, plural
from spartito.registry import default_name, names_anywhere, simplest_first, strategy_info

ALL = "all"
SWEEPS = ("workers", "batch_size")
PROCESSES, COMPOSE = "processes", "compose"
RUNNERS = (PROCESSES, COMPOSE)
"""What runs the tasks of a comparison: --on."""
ENV_THREADS = "OMP_NUM_THREADS"
"""Says how many threads a process computes with; replicas then do not divide the cores."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One run to come; ``sweep`` names the setting that it varies, None for those of the table.

    ``repeat`` counts the runs of one setting, from 1. ``threads`` is set where the process shall
    not have as many as it takes by itself.
    """

    strategy: Declared
    workers: int
    ps: int = 0
    batch_size: int | None = None
    sweep: str | None = None
    slow: Mapping[str, float] = field(default_factory=dict)
    repeat: int = 1
    threads: int | None = None

    @property
    def setting(self) -> str:
        """What its repeats have in common, and no other run has; a name for a folder."""
        name = self.strategy.slug
        if self.threads is not None:
            name += f"-threads-{self.threads}"
        if self.sweep is None:
            return name
        return f"{name}-{self.sweep.replace('_', '-')}-{getattr(self, self.sweep)}"

    @property
    def folder(self) -> str:
        """The name of its run folder, unlike that of all others."""
        return self.setting if self.repeat == 1 else f"{self.setting}-repeat-{self.repeat}"

    def __str__(self) -> str:
        """As progress says it: ``mirrored, 2 workers``."""
        parts = [str(self.strategy), plural(self.workers, "worker")]
        parts += [f"repeat {self.repeat}"] if self.repeat > 1 else []
        if self.threads is not None:
            parts.append(plural(self.threads, "thread"))
        parts += [f"{self.ps} ps"] if self.ps else []
        parts += [f"batch size {self.batch_size}"] if self.batch_size is not None else []
        parts += [f"{task} at {fraction:.0%}" for task, fraction in self.slow.items()]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole comparison: what is trained, how, and in which runs.

    The runs are jobs in ``containers``, or of processes here where that is None; these are on
    machines of their own where ``link`` says at what line. ``left_out``
    says of each strategy that has no run why it has none. Repeats of a recipe have seeds of
    their own: ``seed``, or the recipe's, and those that follow it.
    """

    program: Program
    runs: Sequence[Planned]
    out: Path
    goal: tuple[str, float] | None = None
    epochs: int | None = None
    data: str | None = None
    seed: int | None = None
    containers: Compose | None = None
    left_out: Sequence[str] = ()
    link: Link | None = None

    def seed_of(self, planned: Planned) -> int | None:
        """The seed that the run ``planned`` gets; None: that of the recipe, or the script's own."""
        if not self.is_recipe or (self.seed is None and planned.repeat == 1):
            return self.seed
        return (RECIPE_SEED if self.seed is None else self.seed) + planned.repeat - 1

    @property
    def is_recipe(self) -> bool:
        """Whether a recipe is trained, whose options are ours to give."""
        return self.program.kind == "recipe"

    def program_of(self, planned: Planned) -> Program:
        """What the run ``planned`` trains, a recipe with its options."""
        if not self.is_recipe:
            return self.program
        given = {
            "--epochs": self.epochs,
            "--batch-size": planned.batch_size,
            "--seed": self.seed_of(planned),
        }
        options = (f"{name}={value}" for name, value in given.items() if value is not None)
        return replace(self.program, arguments=tuple(options))

    @property
    def environment(self) -> dict[str, str]:
        """What tells a script its number of epochs."""
        told = self.epochs is not None and not self.is_recipe
        return {ENV_EPOCHS: str(self.epochs)} if told else {}


@dataclass(frozen=True, slots=True)
class Launch:
    """What a run is started with: a command from its start to its end, and its own variables.

    ``mixed``: what went wrong may be on stdout too, as in the log of containers.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    mixed: bool = False


def containers_for(on: str, options: Compose) -> Compose | None:
    """What ``--on`` and the ``options`` of containers mean: these, or None for processes.

    Raises `UserError` for another word, and for options of containers without containers.
    """
    if on not in RUNNERS:
        raise UserError(f"--on {on} is neither {PROCESSES} nor {COMPOSE}", nearest(on, RUNNERS))
    if on == COMPOSE:
        return options
    for one in fields(options):
        if getattr(options, one.name) != one.default:
            flag = f"--{one.name.replace('_', '-')}"
            raise UserError(f"{flag} is for containers", f"Add --on {COMPOSE}, or leave it out.")
    return None


def _against(options: Compose | None, link: Link | None, strategy: str) -> str | None:
    """Why ``strategy`` cannot have several workers there; None where it can."""
    if link is not None:
        info = strategy_info(strategy)
        if not info.one_machine or info.most_replicas == 1:
            return None
        return (
            f"{strategy} is left out: it is for one machine, and at --link {link} each task is on "
            "a machine of its own"
        )
    lacking = [] if options is None else options.lacks(strategy)
    if not lacking:
        return None
    return (
        f"{strategy} is left out: it is for one machine, and each container is a machine of "
        f"its own; {' '.join(lacking)} would make them one"
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asks to compare.

    Args:
        target: A recipe, or the path of a script.
        arguments: The script's own.
        strategies: Which, with commas; or all.
        workers: The tasks that compute.
        ps: The parameter servers, for the strategy that has them.
        epochs: Passes over the data.
        goal: What to reach, as ``val_accuracy=0.95``.
        sweep: Settings of more runs, as ``workers=1,2,4``.
        slow: Tasks that run a fraction of the time only, as ``worker:1=0.25``.
        link: The line at which each task is on a machine of its own.
        repeat: Runs of each.
        batch_size: A recipe's examples per step.
        seed: Where a recipe's randomness begins.
        data: The folder with a recipe's data, or its URL.
        out: The folder to write.
        containers: How containers run the tasks; None: processes do.
        known: The strategies that are all; None: those that are installed.
        cores: Which the processes here divide among them; None: nobody asks.
    """

    target: str
    arguments: Sequence[str] = ()
    _: KW_ONLY
    strategies: str = ALL
    workers: int = option("Processes or containers that compute.", 2, least=1)
    ps: int | None = option(
        "Parameter servers, for the strategy that has them; 1 by default.", least=1
    )
    epochs: int | None = option("Passes over the data.", least=1)
    goal: str | None = option("What to reach, as val_accuracy=0.95.", metavar="NAME=VALUE")
    sweep: tuple[str, ...] = Heading.ADVANCED.option(
        "More runs: workers=1,2,4, or for recipes batch_size=32,512,8192.",
        (),
        metavar="NAME=VALUES",
    )
    slow: tuple[str, ...] = Heading.ADVANCED.option(
        "Let a process run a fraction of the time only, as worker:1=0.25.",
        (),
        metavar="TASK=FRACTION",
    )
    link: str | None = Heading.ADVANCED.option(
        "Put each task on a machine of its own (a network namespace: needs root), at a "
        "line of this rate and delay, as 100mbit or 10mbit,50ms.",
        metavar="RATE[,DELAY]",
    )
    repeat: int = option("Runs of each, in turn; the table has medians and spreads.", 1, least=1)
    batch_size: int | None = Heading.TRAINING.option(
        "A recipe's examples per step, over all workers.", least=1
    )
    seed: int | None = Heading.TRAINING.option("Where a recipe's randomness begins.")
    data: str | None = None
    out: Path | None = None
    containers: Compose | None = None
    known: Sequence[str] | None = None
    cores: int | None = None


def make_plan(asked: Asked) -> Plan:
    """The runs for what the user typed; raises `UserError` for what cannot be.

    The table's runs come first, one per strategy; each sweep adds its other values. Then all of
    it is repeated, so that what disturbs the machine for a while does not disturb one strategy
    alone. Of all strategies those that containers or a link do not allow are left out. With
    ``cores`` one device is trained once more with as many threads as each process of the others
    has: threads that wait for one another are another thing than processes that do.
    """
    program = _program(asked.target, asked.arguments)
    chosen = _strategies(asked.strategies, names_anywhere() if asked.known is None else asked.known)
    line = None if asked.link is None else Link.read(asked.link)
    if line and asked.containers:
        raise UserError(f"--link {line} is for processes", "Leave --on compose out.")
    apart = (asked.containers, line) if asked.workers > 1 else (None, None)
    against = {one.name: _against(*apart, one.name) for one in chosen}
    left_out = [why for why in against.values() if why] if asked.strategies == ALL else []
    if line and not left_out and any(against.values()):
        why = next(filter(None, against.values())).replace(" is left out: it", "")
        raise UserError(why, f"Compare others, as {default_name(2, 0)}, or leave --link out.")
    chosen = [one for one in chosen if not (left_out and against[one.name])]
    if asked.ps is not None and asked.ps < 1:
        raise UserError(f"--ps {asked.ps} is less than 1")
    infos = [strategy_info(one.name) for one in chosen]
    if asked.ps is not None and not any(info.needs_servers for info in infos):
        raise UserError(
            f"--ps {asked.ps} is for {default_name(1, asked.ps)}, which is not among "
            f"{asked.strategies}",
            "Leave --ps out, or compare that strategy too.",
        )
    wanted = _sweeps(asked.sweep)
    given: dict[str, object] = {"--batch-size": asked.batch_size, "--seed": asked.seed}
    if asked.containers is None:
        given = {"--data": asked.data, **given}
    given["--sweep batch_size"] = wanted.get("batch_size")
    for flag, value in given.items():
        if value is not None and program.kind != "recipe":
            raise UserError(
                f"{flag} is for recipes, and {asked.target} is a script",
                "A script has its own arguments: give them after --, at the end.",
            )
    table = [
        Planned(
            one,
            min(asked.workers, info.most_replicas or asked.workers),
            (asked.ps or 1) if info.needs_servers else 0,
            asked.batch_size,
        )
        for one, info in zip(chosen, infos, strict=True)
    ]
    here = None if asked.containers or line else asked.cores
    runs = _with_few_threads(table, asked.workers, here)
    runs += [run for sweep in wanted for run in _added(table, sweep, wanted[sweep])]
    if asked.containers is not None and asked.slow:
        raise UserError(
            f"--slow {asked.slow[0]} stops and continues a process; a container has CPUs",
            "Give them one by one, as --cpus 1,0.25.",
        )
    new = f"compare-{Path(asked.target).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = asked.out or Path("runs") / new
    if folder.is_dir() and any(file.name != LOCK for file in folder.iterdir()):
        raise UserError(f"--out {folder} is not empty", "Name a new folder; nothing is replaced.")
    if asked.repeat < 1:
        raise UserError(f"--repeat {asked.repeat} is less than 1", "1 runs everything once.")
    once = _slowed(runs, asked.slow)
    return Plan(
        program,
        [replace(run, repeat=number) for number in range(1, asked.repeat + 1) for run in once],
        folder,
        _goal(asked.goal),
        asked.epochs,
        asked.data,
        asked.seed,
        asked.containers,
        left_out,
        line,
    )


def _strategies(text: str, known: Sequence[str]) -> list[Declared]:
    """Those that ``--strategies`` names; all from the simplest on."""
    if text.strip() == ALL:
        return [Declared(name) for name in sorted(known, key=simplest_first)]
    return parse_all(text, "--strategies")


def _with_few_threads(table: Sequence[Planned], workers: int, cores: int | None) -> list[Planned]:
    """``table``, and behind one device the same with as many threads as each other process has."""
    fewer = None if cores is None else max(1, cores // workers)
    if fewer == cores or all(run.workers == 1 for run in table):
        return list(table)
    return [
        one
        for run in table
        for one in (
            (run, replace(run, threads=fewer))
            if run.workers == 1 and _most(run) == 1 and run.threads is None
            else (run,)
        )
    ]


def _program(target: str, arguments: Sequence[str]) -> Program:
    if target.endswith(".py"):
        check_program([target], module=False)
    program = Program.find(target, tuple(arguments))
    if program.kind == "recipe" and arguments:
        raise UserError(
            f"{arguments[0]!r} after {target}: a recipe takes no arguments of its own",
            "Its options are those of spartito compare.",
        )
    return program


def _goal(text: str | None) -> tuple[str, float] | None:
    if text is None:
        return None
    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not name.isidentifier() or not math.isfinite(value):
        raise UserError(
            f"--goal {text!r} is not a figure and its value", "Write it as val_accuracy=0.95."
        )
    return name, value


def _sweeps(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in SWEEPS:
            raise UserError(f"--sweep {text!r} names no setting", nearest(name, SWEEPS))
        if name in found:
            raise UserError(f"--sweep names {name} twice", f"Give all: {name}=1,2,4.")
        numbers = values.split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in numbers):
            raise UserError(
                f"--sweep {text!r} is not a list of whole numbers above 0",
                f"Write it as {name}=1,2,4.",
            )
        found[name] = tuple(sorted({int(part) for part in numbers}))
    return found


def _added(table: Sequence[Planned], sweep: str, values: Sequence[int]) -> list[Planned]:
    """The runs of a sweep that the table has not yet, with no more workers than a strategy can."""
    return [
        replace(run, sweep=sweep, **_setting(sweep, value))
        for run in table
        for value in values
        if getattr(run, sweep) != value and not (sweep == "workers" and _most(run) < value)
    ]


def _most(run: Planned) -> float:
    return strategy_info(run.strategy.name).most_replicas or math.inf


def _setting(sweep: str, value: int) -> dict[str, Any]:
    return {sweep: value}


def _slowed(runs: Sequence[Planned], texts: Iterable[str]) -> list[Planned]:
    """``runs``, each with those slow tasks that it has."""
    fractions = slow_tasks(texts)
    tasks = [
        {
            f"{kind}:{n}"
            for kind, count in (("worker", r.workers), ("ps", r.ps))
            for n in range(count)
        }
        for r in runs
    ]
    there = sorted(set().union(*tasks))
    for task in fractions:
        if task not in there:
            raise UserError(f"--slow {task} is in no run of this", nearest(task, there))
    return [
        replace(run, slow={t: s for t, s in fractions.items() if t in mine and s < FULL})
        for run, mine in zip(runs, tasks, strict=True)
    ]
