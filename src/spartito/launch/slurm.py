"""A job for Slurm as one checked value, and its batch file as one would write it by hand."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from spartito.cluster.endpoints import parse_range
from spartito.cluster.listed import ENV_EVALUATOR, ENV_PS
from spartito.errors import EXIT_PREEMPTED, EXIT_TASK_LOST, UserError
from spartito.launch.containers.plan import LEAST_MEMORY, memory_bytes
from spartito.launch.job import JobSpec, check_folders_of_recipe, option
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
from spartito.launch.target import check_folder, inside_here, quoted
from spartito.names import (
    ENV_PORTS,
    ENV_RUN_DIR,
    ENV_SECRET,
    ENV_SECRET_FILE,
    ENV_STRATEGY,
    ENV_STRATEGY_OPTIONS,
    ENV_TLS,
)
from spartito.registry import default_name, strategy_info

NUMBER = "$SLURM_JOB_ID"
RUN_DIR = f'"${ENV_RUN_DIR}"'
"""The run folder as the command names it: the shell puts it in."""

RANDOM = f"$([ -n \"${{{ENV_SECRET_FILE}-}}\" ] || od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')"
"""32 random bytes in the shell's words: a secret of this job, which no command line shows; none
where the user names a file that has one."""

KILLED = (129, 137, 143)
"""How srun says that SIGHUP, SIGKILL or SIGTERM ended a task."""

NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """Write the batch file of a Slurm job; redirect it into a file.

    Example: spartito cluster slurm mnist --nodes 2 --workers 4 -- --epochs 3 > job.sbatch

    --workers counts the workers of all nodes together.

    Args:
        nodes: the machines that Slurm gives.
        partition: their partition.
        account: the account that pays.
        time: the time limit, as Slurm writes it.
        qos: the quality of service.
        constraint: features of the nodes.
        exclusive: whether no other job shares the nodes.
        gres: what each node must have.
        gpus_per_node: the GPUs of each node.
        sbatch: further options of ``sbatch``.
        setup: lines of the shell before the tasks start.
        signal: a signal for each task before the time is over, as ``USR1@120``.
        cpus_per_task: the CPUs of each task.
        memory: the memory of each node, as ``8g``.
        python: the nodes' Python; this one by default.
    """

    nodes: int = option("Machines that Slurm gives.", 1, least=1)
    partition: str | None = option("The partition of the nodes.", metavar="NAME")
    account: str | None = option("The account that pays.", metavar="NAME")
    time: str | None = option("The time limit, as 01:00:00.", metavar="TIME")
    qos: str | None = option("The quality of service.", metavar="NAME")
    constraint: str | None = option("Features of the nodes, as a100&nvlink.", metavar="LIST")
    exclusive: bool = option("Nodes that no other job shares.", False)
    gres: str | None = option("What each node must have, as gpu:1.", metavar="LIST")
    gpus_per_node: str | None = option("GPUs of each node, as 2 or a100:2.", metavar="N")
    sbatch: tuple[str, ...] = option(
        "A further option of sbatch, as --mail-type=END.", (), metavar="OPTION"
    )
    setup: tuple[str, ...] = option(
        "A line of the shell before it starts, as 'module load cuda'.", ()
    )
    signal: str | None = option(
        "A signal for each task before the time is over, as USR1@120.", metavar="SIGNAL"
    )
    cpus_per_task: int = option("CPUs of each task.", 1, least=1)
    memory: str | None = option("Memory of each node, as 8g.", metavar="SIZE")
    python: str | None = option("The nodes' Python; this one by default.", metavar="PATH")

    def start(self, job: JobSpec) -> int:
        """Print the file.

        Args:
            job: what is to run.

        Returns:
            0.

        Raises:
            UserError: the job cannot run so.
        """
        sys.stdout.write(batch_file(self.plan(job)))
        return 0

    def plan(self, job: JobSpec) -> BatchJob:
        """Check the job, before it is in a queue.

        Args:
            job: what is to run.

        Returns:
            What the file says.

        Raises:
            UserError: the job cannot run so.
        """
        roles = job.roles()
        if roles.chief:
            raise UserError(
                "--chief under Slurm, where worker 0 hands out the work", "Leave --chief out."
            )
        strategy = job.choose(roles)
        self._check_nodes(strategy, roles)
        check_gpus(strategy, self.gres, self.gpus_per_node, self.nodes, roles)
        limit = None if self.time is None else time_seconds(self.time)
        if self.signal is not None:
            check_signal(self.signal, limit)
        check_folder("--data", job.data)
        about, command = self._command(job)
        name = job.name or re.sub(r"[^A-Za-z0-9_-]+", "-", about.removesuffix(".py")).strip("-_")
        if not NAMES.fullmatch(name):
            raise UserError(
                f"--name {name!r} cannot name a job",
                "Use letters, digits, ., - and _, with a letter or a digit first.",
            )
        texts = ("partition", "account", "qos", "constraint", "gres", "gpus_per_node")
        check_values({text.replace("_", "-"): getattr(self, text) for text in texts})
        check_setup(self.setup)
        planned = BatchJob(
            name=name,
            about=about,
            command=command,
            strategy=strategy,
            roles=roles,
            asked=self,
            strategy_options=job.strategy_options,
            out=None if job.out is None else _named(job.out),
            memory=None if self.memory is None else _memory(self.memory, self.nodes, roles),
            ports=None if job.ports is None else parse_range(job.ports, "--ports"),
            insecure=job.insecure,
        )
        check_lines(self.sbatch, [*(name for name, _ in _options(planned)), "ntasks-per-node"])
        return planned

    def _command(self, job: JobSpec) -> tuple[str, tuple[str, ...]]:
        """What the job is called, and what a task runs in the shell's words."""
        program = replace(job.program, arguments=tuple(map(shlex.quote, job.program.arguments)))
        if program.script is not None and job.data is not None:
            raise UserError(
                f"--data {job.data} is for recipes, and {program.name} is a script",
                "Give it to the script, by an option of its own after --.",
            )
        check_folders_of_recipe(job.program, "slurm")
        script = None if program.script is None else shlex.quote(_named(program.script))
        data = None if job.data is None else shlex.quote(_named(job.data))
        python = quoted(self.python or sys.executable)
        return program.title, (python, *program.argv(script, out=RUN_DIR, data=data))

    def _check_nodes(self, strategy: str, roles: Roles) -> None:
        if self.nodes > 1 and strategy_info(strategy).one_machine:
            raise UserError(
                f"{strategy} is for one machine, but --nodes {self.nodes} are several",
                f"Use --strategy {default_name(2, 0)}, or --nodes 1.",
            )
        if self.nodes > len(roles.tasks):
            raise UserError(
                f"--nodes {self.nodes} are more than the job's {_plural(len(roles.tasks), 'task')}",
                f"Add workers: --workers {self.nodes}; they count over all nodes.",
            )


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job for Slurm, checked: see `Slurm.plan`.

    ``command`` is what every task runs, in the shell's words. ``out`` is the run folder; None
    means one by the job's number. ``memory`` is in MiB for each node. With ``insecure`` tasks do
    not encrypt what they send. ``asked`` has the rest.
    """

    name: str
    about: str
    command: tuple[str, ...]
    strategy: str
    roles: Roles
    asked: Slurm = Slurm()
    strategy_options: str | None = None
    out: str | None = None
    memory: int | None = None
    ports: range | None = None
    insecure: bool = False

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


def batch_file(job: BatchJob) -> str:
    """The file that ``sbatch`` takes."""
    return "\n".join(
        [
            "#!/bin/bash",
            *_heading(job),
            *(f"#SBATCH --{option}={value}" for option, value in _options(job)),
            "#SBATCH --requeue",
            *(["#SBATCH --exclusive"] if job.asked.exclusive else []),
            *(f"#SBATCH {line}" for line in job.asked.sbatch),
            "",
            *([*job.asked.setup, ""] if job.asked.setup else []),
            *(f"export {name}={value}" for name, value in _variables(job)),
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
    yield f"# {job.about} under {job.strategy}: {who} on {_plural(job.asked.nodes, 'node')}."
    yield "#"
    for command, what in commands.items():
        yield f"#   {command:<{width}}   # {what}"
    yield "#"
    yield "# Paths are relative to the folder where it is submitted."
    folder = job.out or f"runs/{job.name}-NUMBER"
    yield f"# Model and report: {folder}\n"


def _options(job: BatchJob) -> Iterator[tuple[str, str | int]]:
    """The options of ``sbatch``, in the order in which people write them."""
    asked, roles = job.asked, job.roles
    # Servers and the evaluator come last: in blocks they would have nodes of their own.
    mixed = asked.nodes > 1 and job.tasks > roles.workers
    found: dict[str, str | int | None] = {
        "job-name": job.name,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "nodes": asked.nodes,
        "ntasks": job.tasks,
        "ntasks-per-node": None if job.tasks % asked.nodes else job.tasks // asked.nodes,
        "distribution": "cyclic" if mixed else None,
        "cpus-per-task": asked.cpus_per_task,
        "mem": None if job.memory is None else f"{job.memory}M",
        "gres": asked.gres,
        "gpus-per-node": asked.gpus_per_node,
        "time": asked.time,
        "signal": asked.signal,
        "output": "%x-%j.out",
        "open-mode": "append",
    }
    return ((name, value) for name, value in found.items() if value is not None)


def _variables(job: BatchJob) -> Iterator[tuple[str, str | int]]:
    """What the tasks find in their environment."""
    yield ENV_STRATEGY, job.strategy
    if job.strategy_options is not None:
        yield ENV_STRATEGY_OPTIONS, shlex.quote(job.strategy_options)
    if job.roles.ps:
        yield ENV_PS, job.roles.ps
    if job.roles.evaluator:
        yield ENV_EVALUATOR, 1
    if job.tasks > 1:
        yield ENV_SECRET, RANDOM
    if job.insecure:
        yield ENV_TLS, "off"
    if job.ports is not None:
        yield ENV_PORTS, f"{job.ports[0]}-{job.ports[-1]}"
    yield ENV_RUN_DIR, job.run_dir
    yield "OMP_NUM_THREADS", job.asked.cpus_per_task
    yield "PYTHONUNBUFFERED", 1
    for name, value in RUNTIME.items():
        yield name, f"${{{name}:-{value}}}"  # sbatch carries the user's own along


def _step(job: BatchJob) -> Iterator[str]:
    """The one line that starts the tasks, and what is made of its exit code."""
    if job.insecure:
        yield "echo 'spartito: insecure: what tasks send is not encrypted (--insecure)' >&2"
    if job.asked.signal is not None:
        yield "# The signal goes to each task. With BackupAndRestore all save one step and end."
        yield "# Without it, and without a handler of the script's own, training goes on."
    # Those who lose a task end by themselves and name it: Slurm is not to kill them before.
    options = [f"--cpus-per-task={job.asked.cpus_per_task}", "--kill-on-bad-exit=0"]
    if job.tasks > 1:
        options.append("--label")
    yield " ".join(["srun", *options, *job.command])
    yield ""
    yield "# A task that was killed is a lost task, whose exit code is 69."
    yield "code=$?"
    yield f"case $code in {' | '.join(map(str, KILLED))}) code={EXIT_TASK_LOST} ;; esac"
    yield f"# {EXIT_PREEMPTED}: told to end, and all is saved. The job goes on when its turn comes."
    yield f'[ $code != {EXIT_PREEMPTED} ] || scontrol requeue "{NUMBER}"'
    yield "exit $code"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _named(path: Path) -> str:
    """``path`` as seen from the present folder, whole where it is outside."""
    inside = inside_here(path)
    return str(path.resolve() if inside is None else inside)


def _memory(text: str, nodes: int, roles: Roles) -> int:
    """The MiB of each node."""
    size = memory_bytes(text)
    least = -(-len(roles.tasks) // nodes) * LEAST_MEMORY
    if size < least:
        raise UserError(
            f"--memory {text} of each node is too small: Python and torch alone take "
            f"{least >> 20}m for the tasks there",
            "The model, its optimizer and a batch need memory as well.",
        )
    return size >> 20
