"""A job as it is asked for, whatever starts it: `JobSpec`, and the `Launcher` that takes one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from spartito.cluster.endpoints import parse_range
from spartito.errors import UserError
from spartito.launch.axes import mesh_size, parse_axes, pipeline_size
from spartito.launch.roles import Roles
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
from spartito.registry import added_by_packages, default_name, strategy_info, strategy_names

GROUP = "spartito.launchers"
"""The entry points by which packages add launchers, as commands ``spartito cluster NAME``."""


@dataclass(frozen=True, slots=True)
class Option:
    """What the command line says of a field of a `JobSpec` or a launcher; see `option`."""

    help: str
    flag: str = ""
    least: int | None = None
    metavar: str | None = None


def option(
    help: str,
    default: Any = None,
    *,
    flag: str = "",
    least: int | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is an option of the command line too.

    Args:
        help: the sentence for ``--help``.
        default: the value where the option is not given.
        flag: the option, ``--`` and the field's name by default.
        least: the smallest whole number allowed, for fields that are one.
        metavar: what ``--help`` calls the value.

    Returns:
        The field.
    """
    return field(default=default, metadata={"option": Option(help, flag, least, metavar)})


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
        strategy: its name; None lets ``SPARTITO_STRATEGY`` decide, else the number of tasks.
        strategy_options: its keyword arguments as a JSON object.
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
        data: the folder with a recipe's data.
    """

    program: Program
    strategy: str | None = option(f"One of {', '.join(strategy_names())}.", metavar="NAME")
    strategy_options: str | None = option(
        "The strategy's keyword arguments, a JSON object.", metavar="JSON"
    )
    mesh: str | None = option(
        "The axes over which a model is laid out, as data=2,model=2; the strategy is then mesh "
        "(pipeline, with an axis of this name), "
        "unless another is named, and the axes say how many tasks compute.",
        metavar="AXES",
    )
    stages: int | None = option(
        "Parts into which a pipeline divides the layers of a model; the strategy is then pipeline, "
        "and a task computes each stage, unless --workers or --mesh say more.",
        least=1,
    )
    microbatches: int | None = option(
        "Parts of a batch that pass the stages of a pipeline in turn.", least=1
    )
    workers: int | None = option(
        "Tasks that compute: on each machine under run and train (one per GPU, or one, by "
        "default), in all under cluster.",
        least=1,
    )
    ps: int = option(
        "Parameter servers of the job; the strategy is then parameter_server.", 0, least=0
    )
    evaluator: bool = option("A task of its own that evaluates each checkpoint.", False)
    chief: bool = option("With --ps: a task of its own that hands out the work.", False)
    ports: str | None = option(
        "The ports at which tasks may listen, as 29500-29510; by default those of the cluster, "
        "else what the system draws.",
        metavar="A-B",
    )
    interface: str | None = option(
        "The network interface at which tasks listen, as eth1, or its address.", metavar="NAME"
    )
    insecure: bool = option(
        "Leave out TLS, also where others could read what the tasks send.", False
    )
    name: str | None = option("The job's name; that of its script by default.", metavar="JOB")
    out: Path | None = option("The run folder; runs/NAME by default.")
    data: Path | None = option("The folder with the data.")

    def __post_init__(self) -> None:
        """Check what needs no knowledge of where the tasks run; raises `UserError`."""
        if self.ports is not None:
            parse_range(self.ports, "--ports")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"--workers {self.workers} is less than 1")
        if self.strategy is not None:
            strategy_info(self.strategy)
        if self.strategy_options is not None:
            _check_options(self.strategy_options)
        self._take_in("--stages", self.stages, "stages", self.stages, "pipeline")
        self._take_in(
            "--microbatches", self.microbatches, "microbatches", self.microbatches, "pipeline"
        )
        if self.mesh is not None:
            axes = parse_axes(self.mesh)
            stands_for = "pipeline" if "pipeline" in axes else "mesh"
            self._take_in("--mesh", self.mesh, "mesh", axes, self.strategy or stands_for)

    def _take_in(self, flag: str, said: Any, name: str, value: Any, strategy: str) -> None:
        """Make ``value`` the option ``name`` of the strategy, which ``flag`` is short for."""
        if value is None:
            return
        if self.strategy not in (None, strategy):
            raise UserError(
                f"{flag} {said} under --strategy {self.strategy}, which has no {name}",
                f"Leave it out, or choose --strategy {strategy}.",
            )
        given = json.loads(self.strategy_options or "{}")
        if given.get(name, value) != value:
            raise UserError(
                f"{flag} {said} and --strategy-options {self.strategy_options}",
                f"Say once what {name} is.",
            )
        object.__setattr__(self, "strategy_options", json.dumps({**given, name: value}))
        object.__setattr__(self, "strategy", strategy)

    @property
    def mesh_size(self) -> int | None:
        """How many tasks the mesh of the job has; None where none is given."""
        return mesh_size(json.loads(self.strategy_options or "{}"))

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
        options = json.loads(self.strategy_options or "{}")
        tasks = self.mesh_size or pipeline_size(self.strategy, options)
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
        out, data = (None if path is None else str(path) for path in (self.out, self.data))
        return self.program.argv(out=out, data=data)

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
    ) -> str:
        """Check that the job's roles and its strategy can be so.

        Args:
            roles: the tasks that the launcher starts.
            replicas: all processes that train; those of ``roles`` by default.
            here: those that share a machine; all by default.
            servers: the job's parameter servers; those of ``roles`` by default.
            env: the environment that the tasks inherit, which may name a strategy too.
            source: what says already who is in the job, if anything does.

        Returns:
            The strategy's name.

        Raises:
            UserError: the strategy is unknown, or it or these roles cannot be.
        """
        roles.check(source)
        replicas = roles.workers if replicas is None else replicas
        servers = roles.ps if servers is None else servers
        name = self.strategy or (env or {}).get(ENV_STRATEGY) or default_name(replicas, servers)
        strategy_info(name).check(replicas, replicas if here is None else here, servers)
        if self.mesh_size not in (None, replicas):
            raise UserError(
                f"a mesh of {self.mesh_size} tasks in a job of {replicas}",
                f"Start {self.mesh_size} tasks, or give axes whose sizes multiply to {replicas}.",
            )
        return name

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """What a job's options say to its tasks.

        Args:
            env: what they inherit.

        Returns:
            ``env``, and the variables that the options set.
        """
        said = {
            ENV_STRATEGY: self.strategy,
            ENV_STRATEGY_OPTIONS: self.strategy_options,
            ENV_PORTS: self.ports,
            ENV_INTERFACE: self.interface,
            ENV_TLS: "off" if self.insecure else None,
        }
        return {**env, **{name: value for name, value in said.items() if value is not None}}


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


def _check_options(options: str) -> None:
    try:
        value = json.loads(options)
    except json.JSONDecodeError as error:
        raise UserError(f"--strategy-options {options!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(
            f"--strategy-options {options!r} is not a JSON object",
            "Write the keyword arguments as '{\"name\": value}'.",
        )
