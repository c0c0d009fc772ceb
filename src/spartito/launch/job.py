"""A job as it is asked for, whatever starts it: `JobSpec`, and the `Launcher` that takes one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from spartito.cluster.endpoints import parse_range
from spartito.declared import Declared, declared_by, json_options, parse
from spartito.errors import UserError
from spartito.launch.axes import check_axes, mesh_size, parse_axes, pipeline_size
from spartito.launch.processes.roles import Roles
from spartito.launch.target import check_program
from spartito.names import (
    ENV_INTERFACE,
    ENV_PORTS,
    ENV_STRATEGY,
    ENV_STRATEGY_OPTIONS,
    ENV_TLS,
    RECIPES,
    nearest,
)
from spartito.registry import added_by_packages, default_name, strategy_info
from spartito.urls import is_remote

GROUP = "spartito.launchers"
"""The entry points by which packages add launchers, as commands ``spartito cluster NAME``."""


class Heading(StrEnum):
    """The headings under which ``--help`` lists options, in this order."""

    TRAINING = "Training"
    STRATEGY = "Strategy"
    WORKERS = "Workers"
    MACHINES = "Several machines"
    RAY = "Ray"
    RECOVERY = "Recovery"
    FAULTS = "Faults"
    PROFILE = "Profile"
    OUTPUT = "Output"
    ADVANCED = "Advanced"

    def option(
        self,
        help: str,
        default: Any = None,
        *,
        least: int | None = None,
        metavar: str | None = None,
    ) -> Any:
        """A field as `option` makes it, listed under this heading.

        Args:
            help: as of `option`, like the next three.
            default: the value where the option is not given.
            least: the smallest whole number allowed.
            metavar: what ``--help`` calls the value.

        Returns:
            The field.
        """
        return option(help, default, least=least, metavar=metavar, heading=self)


@dataclass(frozen=True, slots=True)
class Option:
    """What the command line says of a field of a `JobSpec` or a launcher; see `option`."""

    help: str
    flag: str = ""
    least: int | None = None
    metavar: str | None = None
    heading: str = ""


def option(
    help: str,
    default: Any = None,
    *,
    flag: str = "",
    least: int | None = None,
    metavar: str | None = None,
    heading: str = "",
) -> Any:
    """A dataclass field that is an option of the command line too.

    Args:
        help: the sentence for ``--help``.
        default: the value where the option is not given.
        flag: the option, ``--`` and the field's name by default.
        least: the smallest whole number allowed, for fields that are one.
        metavar: what ``--help`` calls the value.
        heading: what ``--help`` lists it under, one of `Heading`; the launcher's name by default.

    Returns:
        The field.
    """
    return field(default=default, metadata={"option": Option(help, flag, least, metavar, heading)})


@dataclass(frozen=True, slots=True)
class Program:
    """What every task of a job runs.

    Args:
        name: the path of a script, the name of a module, or that of a recipe.
        arguments: its own arguments.
        kind: ``"script"``, ``"module"`` or ``"recipe"``.
    """

    name: str
    arguments: tuple[str, ...] = ()
    kind: str = "script"

    @classmethod
    def find(cls, target: str, arguments: tuple[str, ...] = ()) -> Program:
        """The program that a user named.

        Args:
            target: a recipe, or the path of a script.
            arguments: its own arguments.

        Returns:
            The recipe or the script.

        Raises:
            UserError: it is neither.
        """
        if target in RECIPES:
            return cls(target, arguments, "recipe")
        if not Path(target).is_file():
            if target.endswith(".py"):
                check_program([target], False)
            raise UserError(
                f"{target!r} is neither a script nor a recipe", nearest(target, RECIPES)
            )
        return cls(target, arguments)

    @property
    def title(self) -> str:
        """What the job is called after it: the recipe, the module, or the file of the script."""
        return Path(self.name).name if self.kind == "script" else self.name

    @property
    def script(self) -> Path | None:
        """The script, None for a module or a recipe."""
        return Path(self.name) if self.kind == "script" else None

    @property
    def module(self) -> str | None:
        """The module that Python runs, None for a script."""
        recipe = f"spartito.recipes.{self.name}"
        return {"script": None, "module": self.name, "recipe": recipe}[self.kind]

    def check(self) -> None:
        """Raise `UserError` where Python could not run it here."""
        check_program([self.module or self.name], self.module is not None)

    def argv(self, script: str | None = None, **folders: str | None) -> tuple[str, ...]:
        """The words after ``python``.

        Args:
            script: the path of the script where the task runs; its name by default.
            folders: a recipe's ``out`` and ``data``; None leaves the option out.

        Returns:
            The program and its arguments.
        """
        if self.module is None:
            return (script or self.name, *self.arguments)
        own = [f"--{name}={path}" for name, path in folders.items() if path is not None]
        return ("-m", self.module, *(own if self.kind == "recipe" else ()), *self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job as it is asked for, the same for every launcher.

    Args:
        program: what every task runs.
        strategy: its text form, as ``local_sgd(every=20)``; None lets ``SPARTITO_STRATEGY``
            decide, else the number of tasks. Once a job is made, all that it says of a strategy
            which it names is in this one text; see `declared`.
        strategy_options: further keyword arguments as a JSON object, which win; they stay here
            where no strategy is named.
        mesh: short for the option ``mesh``, as ``data=2,model=2``; the strategy is then mesh
            (pipeline, with an axis of this name), and
            the axes say how many tasks compute.
        stages: short for the option ``stages``; the strategy is then pipeline, with a task for
            each stage unless ``workers`` or ``mesh`` say more.
        microbatches: short for the option ``microbatches``, of a pipeline too.
        workers: the tasks that compute, on each machine or in all, as the launcher says; None
            leaves their number to it.
        ps: the parameter servers.
        chief: whether a task of its own hands out the work of the servers' job.
        evaluator: whether a task of its own evaluates each checkpoint.
        ports: the ports at which tasks may listen, as ``29500-29510``.
        interface: the network interface at which they listen, by its name or address.
        insecure: whether tasks leave out TLS wherever they listen (``SPARTITO_TLS=off``).
        name: what the job is called; after its program by default.
        out: the run folder.
        data: the folder with a recipe's data, or its URL.
    """

    program: Program
    strategy: str | None = Heading.STRATEGY.option(
        "How tasks train together: a name that 'spartito strategies' lists, with options in "
        "parentheses, as 'local_sgd(every=20)'.",
        metavar="STRATEGY",
    )
    strategy_options: str | None = Heading.STRATEGY.option(
        "Further options of the strategy, a JSON object; they win.", metavar="JSON"
    )
    mesh: str | None = Heading.STRATEGY.option(
        "Axes over which a model is laid out, as data=2,model=2: short for the strategy mesh, or "
        "pipeline with an axis of that name.",
        metavar="AXES",
    )
    stages: int | None = Heading.STRATEGY.option(
        "Parts into which a pipeline divides the layers of a model, a task for each: short for the "
        "strategy pipeline.",
        least=1,
    )
    microbatches: int | None = Heading.STRATEGY.option(
        "Parts of a batch that pass the stages of a pipeline in turn.", least=1
    )
    workers: int | None = Heading.WORKERS.option(
        "Tasks that compute, on each machine (with cluster: in all); by default one per GPU, or "
        "one.",
        least=1,
    )
    ps: int = Heading.WORKERS.option(
        "Parameter servers; the strategy is then parameter_server.", 0, least=0
    )
    evaluator: bool = Heading.WORKERS.option(
        "A task of its own that evaluates each checkpoint.", False
    )
    chief: bool = Heading.WORKERS.option(
        "With --ps: a task of its own that hands out the work.", False
    )
    ports: str | None = Heading.MACHINES.option(
        "Ports at which tasks may listen, as 29500-29510; by default the system chooses.",
        metavar="A-B",
    )
    interface: str | None = Heading.MACHINES.option(
        "The network interface at which tasks listen, as eth1, or its address.", metavar="NAME"
    )
    insecure: bool = Heading.MACHINES.option(
        "Leave out TLS, also where others could read what the tasks send.", False
    )
    name: str | None = Heading.OUTPUT.option(
        "The job's name; that of its script by default.", metavar="JOB"
    )
    out: Path | None = Heading.OUTPUT.option("The run folder; runs/NAME by default.", metavar="DIR")
    data: str | None = Heading.ADVANCED.option(
        "The folder with the data, or its URL, as s3://bucket/photos.", metavar="DIR"
    )

    def __post_init__(self) -> None:
        """Check what needs no knowledge of where the tasks run; raises `UserError`."""
        if self.data is not None:
            object.__setattr__(self, "data", os.fspath(self.data))  # a path is as good as its text
        if self.ports is not None:
            parse_range(self.ports, "--ports")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"--workers {self.workers} is less than 1")
        asked = None if self.strategy is None else parse(self.strategy, "--strategy")
        options = json_options(self.strategy_options, "--strategy-options")
        for short in self._shorts(asked):
            asked = _take_in(asked, options, *short)
        if asked is not None:
            asked = asked.with_options(options, "--strategy-options") if options else asked
            check_axes(asked)
        object.__setattr__(self, "strategy", None if asked is None else str(asked))
        left = json.dumps(options) if options and asked is None else None
        object.__setattr__(self, "strategy_options", left)

    def _shorts(self, asked: Declared | None) -> Iterator[tuple[str, Any, str, Any, str]]:
        """What is said in short: the flag, as typed, the option, its value, whose it is."""
        for name, said in {"stages": self.stages, "microbatches": self.microbatches}.items():
            if said is not None:
                yield f"--{name}", said, name, said, "pipeline"
        if self.mesh is not None:
            axes = parse_axes(self.mesh)
            stands_for = "pipeline" if "pipeline" in axes or self._is_pipeline else "mesh"
            yield "--mesh", self.mesh, "mesh", axes, asked.name if asked else stands_for

    @property
    def _is_pipeline(self) -> bool:
        return self.stages is not None or self.microbatches is not None

    @property
    def declared(self) -> Declared | None:
        """The strategy that the job names, with its options; None where it names none."""
        return None if self.strategy is None else parse(self.strategy)

    @property
    def data_folder(self) -> Path | None:
        """The folder of this machine with the data; None where it lies elsewhere."""
        return None if self.data is None or is_remote(self.data) else Path(self.data)

    @property
    def mesh_size(self) -> int | None:
        """How many tasks the mesh of the job has; None where none is given."""
        return mesh_size(self._options)

    @property
    def _options(self) -> Mapping[str, Any]:
        declared = self.declared
        return declared.options if declared else json_options(self.strategy_options, "")

    def workers_on(self, machines: int) -> int | None:
        """The workers that each of so many machines gets.

        Args:
            machines: the machines.

        Returns:
            As asked, else what the mesh or the stages say; None leaves it to the launcher.

        Raises:
            UserError: mesh or stages do not divide among the machines.
        """
        if self.workers is not None:
            return self.workers
        declared = self.declared
        tasks = self.mesh_size or (pipeline_size(declared) if declared else None)
        if tasks is not None and tasks % machines:
            raise UserError(
                f"{'a mesh' if self.mesh_size else 'a pipeline'} of {tasks} tasks on {machines} "
                "machines",
                "Take one whose size the machines divide, or say --workers.",
            )
        return tasks and tasks // machines

    def argv(self) -> tuple[str, ...]:
        """The words after ``python`` for tasks that see the folders of this machine.

        Returns:
            The program, a recipe's folders, and its own arguments.
        """
        return self.program.argv(out=None if self.out is None else str(self.out), data=self.data)

    def roles(self, workers: int | None = None) -> Roles:
        """How many tasks of each role the job has.

        Args:
            workers: the workers; by default as asked, or 1.

        Returns:
            The roles, not checked yet; see `choose`.
        """
        return Roles(workers or self.workers_on(1) or 1, self.ps, self.evaluator, self.chief)

    def choose(
        self,
        roles: Roles,
        replicas: int | None = None,
        here: int | None = None,
        *,
        servers: int | None = None,
        env: Mapping[str, str] | None = None,
        source: str | None = None,
    ) -> Declared:
        """Check that the job's roles and its strategy can be so.

        Args:
            roles: the tasks that the launcher starts.
            replicas: all processes that train; those of ``roles`` by default.
            here: those that share a machine; all by default.
            servers: the job's parameter servers; those of ``roles`` by default.
            env: the environment that the tasks inherit, which may name a strategy too.
            source: what says already who is in the job, if anything does.

        Returns:
            The strategy, with all that is said of it.

        Raises:
            UserError: the strategy or an option is unknown, or it or these roles cannot be.
        """
        roles.check(source)
        replicas = roles.workers if replicas is None else replicas
        servers = roles.ps if servers is None else servers
        found = declared_by(self.environment(env or {}), default_name(replicas, servers))
        info = strategy_info(found.name)
        info.check(replicas, replicas if here is None else here, servers)
        if found.inside is not None and roles.ps:
            alone = found.options.get("groups") == roles.workers
            info.check_inside(strategy_info(found.inside.name), roles.chief or alone)
        if (size := mesh_size(found.options)) not in (None, replicas):
            raise UserError(
                f"a mesh of {size} tasks in a job of {replicas}",
                f"Start {size} tasks, or give axes whose sizes multiply to {replicas}.",
            )
        return found

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """What a job's options say to its tasks.

        Args:
            env: what they inherit.

        Returns:
            ``env``, and the variables that the options set. Of a strategy that the job names,
            its text says all; options that ``env`` has beside it hold where the job says nothing.
        """
        told, declared = dict(env), self.declared
        if declared is not None:
            beside = json_options(told.pop(ENV_STRATEGY_OPTIONS, None), ENV_STRATEGY_OPTIONS)
            declared = declared.with_options({**beside, **declared.options}, ENV_STRATEGY_OPTIONS)
        said = {
            ENV_STRATEGY: None if declared is None else str(declared),
            ENV_STRATEGY_OPTIONS: self.strategy_options,
            ENV_PORTS: self.ports,
            ENV_INTERFACE: self.interface,
            ENV_TLS: "off" if self.insecure else None,
        }
        return {**told, **{name: value for name, value in said.items() if value is not None}}


class Launcher(Protocol):
    """One way to start a job: a frozen dataclass whose fields are its own `option`s.

    A package adds one by an entry point of the group ``spartito.launchers``; it then is the
    command ``spartito cluster NAME``, with the options of a `JobSpec` and its own.
    """

    def start(self, job: JobSpec) -> int:
        """Start the job and follow it to its end, or print what starts it elsewhere.

        Args:
            job: what is to run.

        Returns:
            The exit code: 0 when all is well, 69 when a task was lost, else the task's own.

        Raises:
            UserError: the job cannot run so; nothing was started.
        """
        ...


def added_launchers() -> dict[str, type[Launcher] | UserError]:
    """The launchers of installed packages, by name; for one that cannot be loaded, why."""
    found: dict[str, type[Launcher] | UserError] = {}
    for point in added_by_packages(GROUP):
        try:
            found[point.name] = point.load()
        except Exception as error:
            found[point.name] = UserError(
                f"the launcher {point.name!r} cannot be loaded from {point.value}: {error}",
                "Fix or uninstall the package that adds it.",
            )
    return found


def check_folders_of_recipe(program: Program, command: str) -> None:
    """Raise `UserError` where a recipe gets a folder by its arguments, which a launcher names."""
    for word in program.arguments if program.kind == "recipe" else ():
        name = word.partition("=")[0]
        if name in ("--out", "--data"):
            raise UserError(
                f"{name} after -- is what 'spartito cluster {command}' itself wants to know",
                f"Write {name} before the --.",
            )


def _take_in(
    asked: Declared | None,
    options: dict[str, Any],
    flag: str,
    said: Any,
    name: str,
    value: Any,
    strategy: str,
) -> Declared:
    """Put ``value`` among ``options``, which ``flag`` is short for; the strategy that has it."""
    if asked is not None and asked.name != strategy:
        raise UserError(
            f"{flag} {said} under --strategy {asked}, which has no {name}",
            f"Leave it out, or choose --strategy {strategy}.",
        )
    asked = asked or Declared(strategy)
    given = {**asked.options, **options}
    if given.get(name, value) != value:
        raise UserError(
            f"{flag} {said}, but the strategy's option {name} is {given[name]!r}",
            f"Say once what {name} is.",
        )
    options[name] = value
    return asked
