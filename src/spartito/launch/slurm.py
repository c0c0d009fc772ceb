"""A job for Slurm as one checked value, and its batch file as one would write it by hand."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spartito.cluster.endpoints import parse_range
from spartito.cluster.listed import ENV_EVALUATOR, ENV_PS
from spartito.errors import EXIT_TASK_LOST, UserError
from spartito.launch.containers.plan import LEAST_MEMORY, memory_bytes
from spartito.launch.local import RUNTIME
from spartito.launch.roles import Roles
from spartito.launch.slurm_values import (
    check_gpus,
    check_lines,
    check_setup,
    check_signal,
    check_values,
    time_seconds,
)
from spartito.launch.target import check_folder, choose_strategy, find_script, inside_here, quoted
from spartito.names import ENV_PORTS, ENV_RUN_DIR, ENV_SECRET, ENV_STRATEGY, ENV_STRATEGY_OPTIONS
from spartito.registry import default_name, strategy_info

NUMBER = "$SLURM_JOB_ID"
RUN_DIR = f'"${ENV_RUN_DIR}"'
"""The run folder as the command names it: the shell puts it in."""

RANDOM = "$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')"
"""32 random bytes in the shell's words: a secret of this job, which no command line shows."""

KILLED = (129, 137, 143)
"""How srun says that SIGHUP, SIGKILL or SIGTERM ended a task."""

NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job for Slurm, checked: see `plan_batch`.

    ``command`` is what every task runs, in the shell's words. ``out`` is the run folder; None
    means one by the job's number. ``time``, ``gres``, ``signal`` and the others are as Slurm
    writes them, ``memory`` is in MiB for each node. ``lines`` are further options of ``sbatch``,
    ``setup`` lines of the shell.
    """

    name: str
    about: str
    command: tuple[str, ...]
    strategy: str
    roles: Roles
    nodes: int = 1
    strategy_options: str | None = None
    out: str | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    gres: str | None = None
    signal: str | None = None
    cpus_per_task: int = 1
    memory: int | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus_per_node: str | None = None
    exclusive: bool = False
    lines: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    ports: range | None = None

    @property
    def tasks(self) -> int:
        """How many tasks ``srun`` starts."""
        return len(self.roles.tasks)

    @property
    def run_dir(self) -> str:
        """The run folder in the shell's words."""
        if self.out is not None:
            return shlex.quote(self.out)
        return f'"runs/{self.name}-{NUMBER}"'


def plan_batch(
    target: str,
    arguments: Sequence[str] = (),
    *,
    strategy: str | None = None,
    strategy_options: str | None = None,
    nodes: int = 1,
    workers: int = 1,
    ps: int = 0,
    evaluator: bool = False,
    partition: str | None = None,
    account: str | None = None,
    time: str | None = None,
    gres: str | None = None,
    signal: str | None = None,
    cpus_per_task: int = 1,
    memory: str | None = None,
    qos: str | None = None,
    constraint: str | None = None,
    gpus_per_node: str | None = None,
    exclusive: bool = False,
    lines: Sequence[str] = (),
    setup: Sequence[str] = (),
    ports: str | None = None,
    name: str | None = None,
    out: Path | None = None,
    data: Path | None = None,
    python: str | None = None,
) -> BatchJob:
    """The job that these words ask for, ``target`` being a script or a recipe.

    ``workers`` are those of all nodes; ``memory`` is that of each node, as ``8g``. ``lines`` are
    further options of ``sbatch``, ``setup`` lines of the shell before the tasks start. ``python``
    is this one unless it is named. Raises `UserError` for what cannot run, before it is in a queue.
    """
    roles = Roles(workers, ps, evaluator)
    chosen = choose_strategy(strategy, strategy_options, roles)
    _check_nodes(chosen, nodes, roles)
    check_gpus(chosen, gres, gpus_per_node, nodes, roles)
    limit = None if time is None else time_seconds(time)
    if signal is not None:
        check_signal(signal, limit)
    check_folder("--data", data)
    about, command = _program(target, arguments, data, python or sys.executable)
    job = name or re.sub(r"[^A-Za-z0-9_-]+", "-", about.removesuffix(".py")).strip("-_")
    if not NAMES.fullmatch(job):
        raise UserError(
            f"--name {job!r} cannot name a job",
            "Use letters, digits, ., - and _, with a letter or a digit first.",
        )
    check_values(
        {
            "partition": partition,
            "account": account,
            "qos": qos,
            "constraint": constraint,
            "gres": gres,
            "gpus-per-node": gpus_per_node,
        }
    )
    check_setup(setup)
    planned = BatchJob(
        name=job,
        about=about,
        command=command,
        strategy=chosen,
        roles=roles,
        nodes=nodes,
        strategy_options=strategy_options,
        out=None if out is None else _named(out),
        partition=partition,
        account=account,
        time=time,
        gres=gres,
        signal=signal,
        cpus_per_task=cpus_per_task,
        memory=None if memory is None else _memory(memory, nodes, roles),
        qos=qos,
        constraint=constraint,
        gpus_per_node=gpus_per_node,
        exclusive=exclusive,
        lines=tuple(lines),
        setup=tuple(setup),
        ports=None if ports is None else parse_range(ports, "--ports"),
    )
    check_lines(lines, [*(name for name, _ in _options(planned)), "ntasks-per-node"])
    return planned


def batch_file(job: BatchJob) -> str:
    """The file that ``sbatch`` takes."""
    return "\n".join(
        [
            "#!/bin/bash",
            *_heading(job),
            *(f"#SBATCH --{option}={value}" for option, value in _options(job)),
            *(["#SBATCH --exclusive"] if job.exclusive else []),
            *(f"#SBATCH {line}" for line in job.lines),
            "",
            *([*job.setup, ""] if job.setup else []),
            *(f"export {name}={value}" for name, value in _told(job)),
            "",
            *_step(job),
            "",
        ]
    )


def _heading(job: BatchJob) -> Iterator[str]:
    roles = job.roles
    counts = {"worker": roles.workers, "parameter server": roles.ps}
    counts["evaluator"] = int(roles.evaluator)
    who = ", ".join(_plural(count, what) for what, count in counts.items() if count)
    commands = {
        f"sbatch {job.name}.sbatch": "submit it; prints the job's number",
        "squeue --me": "how it goes",
        f"tail -F {job.name}-NUMBER.out": "what it prints",
        "scancel NUMBER": "end it",
    }
    width = max(map(len, commands))
    yield f"# {job.about} under {job.strategy}: {who} on {_plural(job.nodes, 'node')}."
    yield "#"
    for command, what in commands.items():
        yield f"#   {command:<{width}}   # {what}"
    yield "#"
    yield "# Paths are relative to the folder where it is submitted."
    folder = job.out or f"runs/{job.name}-NUMBER"
    yield f"# Model and report: {folder}\n"


def _options(job: BatchJob) -> Iterator[tuple[str, str | int]]:
    """The options of ``sbatch``, in the order in which people write them."""
    yield "job-name", job.name
    if job.partition is not None:
        yield "partition", job.partition
    if job.account is not None:
        yield "account", job.account
    if job.qos is not None:
        yield "qos", job.qos
    if job.constraint is not None:
        yield "constraint", job.constraint
    yield "nodes", job.nodes
    yield "ntasks", job.tasks
    if job.tasks % job.nodes == 0:
        yield "ntasks-per-node", job.tasks // job.nodes
    if job.nodes > 1 and job.tasks > job.roles.workers:
        # Servers and the evaluator come last: in blocks they would have nodes of their own.
        yield "distribution", "cyclic"
    yield "cpus-per-task", job.cpus_per_task
    if job.memory is not None:
        yield "mem", f"{job.memory}M"
    if job.gres is not None:
        yield "gres", job.gres
    if job.gpus_per_node is not None:
        yield "gpus-per-node", job.gpus_per_node
    if job.time is not None:
        yield "time", job.time
    if job.signal is not None:
        yield "signal", job.signal
    yield "output", "%x-%j.out"


def _told(job: BatchJob) -> Iterator[tuple[str, str | int]]:
    """What the tasks read in their environment."""
    yield ENV_STRATEGY, job.strategy
    if job.strategy_options is not None:
        yield ENV_STRATEGY_OPTIONS, shlex.quote(job.strategy_options)
    if job.roles.ps:
        yield ENV_PS, job.roles.ps
    if job.roles.evaluator:
        yield ENV_EVALUATOR, 1
    if job.tasks > 1:
        yield ENV_SECRET, RANDOM
    if job.ports is not None:
        yield ENV_PORTS, f"{job.ports[0]}-{job.ports[-1]}"
    yield ENV_RUN_DIR, job.run_dir
    yield "OMP_NUM_THREADS", job.cpus_per_task
    yield "PYTHONUNBUFFERED", 1
    for name, value in RUNTIME.items():
        yield name, f"${{{name}:-{value}}}"  # sbatch carries the user's own along


def _step(job: BatchJob) -> Iterator[str]:
    """The one line that starts the tasks, and what is made of its exit code."""
    if job.signal is not None:
        yield "# The signal goes to each task. One that has no handler for it ends there and then,"
        yield "# as Python does by default; checkpoints that are written stay."
    # Those who lose a task end by themselves and name it: Slurm is not to kill them before.
    options = [f"--cpus-per-task={job.cpus_per_task}", "--kill-on-bad-exit=0"]
    if job.tasks > 1:
        options.append("--label")
    yield " ".join(["srun", *options, *job.command])
    yield ""
    yield "# A task that was killed is a lost task, whose exit code is 69."
    yield "code=$?"
    yield f"case $code in {' | '.join(map(str, KILLED))}) code={EXIT_TASK_LOST} ;; esac"
    yield "exit $code"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _program(
    target: str, arguments: Sequence[str], data: Path | None, python: str
) -> tuple[str, tuple[str, ...]]:
    """What the job is called, and what a task runs in the shell's words."""
    script = find_script(target)
    own = tuple(shlex.quote(word) for word in arguments)
    if script is not None:
        if data is not None:
            raise UserError(
                f"--data {data} is for recipes, and {target} is a script",
                "Give it to the script, by an option of its own after --.",
            )
        return script.name, (quoted(python), shlex.quote(_named(script)), *own)
    for word in arguments:
        option = word.partition("=")[0]
        if option in ("--out", "--data"):
            raise UserError(
                f"{option} after -- is what 'spartito cluster slurm' itself wants to know",
                f"Write {option} before the --.",
            )
    folders = [f"--out={RUN_DIR}"]
    if data is not None:
        folders.append(f"--data={shlex.quote(_named(data))}")
    module = f"spartito.recipes.{target}"
    return target, (quoted(python), "-m", module, *folders, *own)


def _named(path: Path) -> str:
    """``path`` as seen from the present folder, whole where it is outside."""
    inside = inside_here(path)
    return str(path.resolve() if inside is None else inside)


def _check_nodes(strategy: str, nodes: int, roles: Roles) -> None:
    if nodes > 1 and strategy_info(strategy).one_machine:
        raise UserError(
            f"{strategy} is for one machine, but --nodes {nodes} are several",
            f"Use --strategy {default_name(2, 0)}, or --nodes 1.",
        )
    if nodes > len(roles.tasks):
        raise UserError(
            f"--nodes {nodes} are more than the job's {_plural(len(roles.tasks), 'task')}",
            f"Add workers: --workers {nodes}; they count over all nodes.",
        )


def _memory(text: str, nodes: int, roles: Roles) -> int:
    """The MiB of each node."""
    size = memory_bytes(text)
    least = -(-len(roles.tasks) // nodes) * LEAST_MEMORY
    if size < least:
        raise UserError(
            f"--memory {text} of each node is too small: Python and torch alone take "
            f"{least >> 20}m for the tasks there",
            "Give the model, its optimizer and a batch room as well.",
        )
    return size >> 20
