"""A job for Slurm, checked before it is in a queue."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from spartito.cluster.endpoints import parse_range
from spartito.errors import UserError
from spartito.launch.containers.plan import LEAST_MEMORY, memory_bytes
from spartito.launch.file_plan import FileLauncher, print_file
from spartito.launch.job import JobSpec, check_folders_of_recipe, option
from spartito.launch.processes.roles import Roles
from spartito.launch.slurm.file import (
    BIND,
    BIND_RUN,
    INDEX,
    RUN_DIR,
    BatchJob,
    batch_file,
    options_of,
)
from spartito.launch.slurm.values import (
    Array,
    check_gpus,
    check_image,
    check_lines,
    check_ports,
    check_printable,
    check_setup,
    check_signal,
    check_values,
    parse_array,
    signal_before,
    time_seconds,
)
from spartito.launch.target import check_data, inside_here, quoted
from spartito.names import plural
from spartito.registry import default_name, strategy_info

NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
MOST_RESTARTS, MOST_RETRIES = 100, 3
INDEX_WORD = "{index}"
"""What stands for the index of an array's run in a word of the program."""
OURS = ("array", "ntasks-per-node")
"""What a ``--sbatch`` may not say, also where the file does not: the rest follows from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm(FileLauncher[BatchJob]):
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
        python: the nodes' Python; this one by default, in a container its own.
        array: the indices of runs of their own, as ``0-9%2``.
        restarts: how often the job may come again.
        retries: how often of these because a task was lost.
        ps_nodes: machines for the servers and the evaluator alone.
        ps_partition: their partition.
        ps_memory: the memory of each of them.
        container: an image of Apptainer, in which the tasks run.
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
        "A line of the shell before it starts, as 'module load cuda'.", (), metavar="LINE"
    )
    signal: str | None = option(
        "A signal for each task before the time is over, as USR1@120.", metavar="SIGNAL"
    )
    cpus_per_task: int = option("CPUs of each task.", 1, least=1)
    memory: str | None = option("Memory of each node, as 8g.", metavar="SIZE")
    python: str | None = option("The nodes' Python; this one by default.", metavar="PATH")
    array: str | None = option("Runs of their own, by their indices, as 0-9%2.", metavar="LIST")
    restarts: int = option(
        "How often the job may come again: told to end, or its nodes are lost.",
        MOST_RESTARTS,
        least=0,
    )
    retries: int = option(
        "How often it may because a task was lost (exit code 69).", MOST_RETRIES, least=0
    )
    ps_nodes: int | None = option("Machines for servers and evaluator alone.", least=1)
    ps_partition: str | None = option("The partition of these machines.", metavar="NAME")
    ps_memory: str | None = option("Memory of each of them, as 8g.", metavar="SIZE")
    container: str | None = option("An image of Apptainer for the tasks.", metavar="IMAGE.sif")

    def write(self, planned: BatchJob) -> None:
        """As `FileLauncher.write`: print it."""
        print_file(batch_file(planned))

    def plan(self, job: JobSpec) -> BatchJob:
        roles = job.roles()
        if roles.chief:
            raise UserError(
                "--chief under Slurm, where worker 0 hands out the work", "Leave --chief out."
            )
        strategy = job.choose(roles)
        here = self._check_nodes(strategy.name, roles)
        for flag, value in {"partition": self.ps_partition, "memory": self.ps_memory}.items():
            if value is not None and self.ps_nodes is None:
                raise UserError(
                    f"--ps-{flag} {value}, but no machines are for servers alone",
                    "Add --ps-nodes 1.",
                )
        check_gpus(strategy.name, self.gres, self.gpus_per_node, self.nodes, roles)
        limit = None if self.time is None else time_seconds(self.time)
        if self.signal is not None:
            check_signal(self.signal, limit)
        array = None if self.array is None else parse_array(self.array)
        check_data(job.data_folder)
        script = job.program.script
        check_printable({"--out": job.out, "the script's name": script and script.name})
        about, command = self._command(job, array)
        name = job.name or re.sub(r"[^A-Za-z0-9_-]+", "-", about.removesuffix(".py")).strip("-_")
        if not NAMES.fullmatch(name):
            raise UserError(
                f"--name {name!r} cannot name a job",
                "Use letters, digits, ., - and _, with a letter or a digit first.",
            )
        texts = ["partition", "account", "qos", "constraint", "gres", "gpus_per_node"]
        texts.append("ps_partition")
        check_values({text.replace("_", "-"): getattr(self, text) for text in texts})
        check_setup(self.setup)
        planned = BatchJob(
            name=name,
            about=about,
            command=command,
            strategy=strategy,
            roles=roles,
            asked=self,
            out=None if job.out is None else _named(job.out),
            memory=self._memory("--memory", self.memory, self.nodes, here),
            ports=None if job.ports is None else parse_range(job.ports, "--ports"),
            insecure=job.insecure,
            signal=self.signal or (signal_before(limit) if job.program.kind == "recipe" else None),
            array=array,
            ps_memory=self._memory(
                "--ps-memory", self.ps_memory, self.ps_nodes or 1, len(roles.tasks) - here
            ),
        )
        if array is not None and planned.ports is not None:
            check_ports(planned.ports, array, -(-here // self.nodes))
        check_lines(self.sbatch, [*(name for name, _ in options_of(planned)), *OURS])
        return planned

    def _command(self, job: JobSpec, array: Array | None) -> tuple[str, tuple[str, ...]]:
        """What the job is called, and what a task runs in the shell's words."""
        quote = shlex.quote if array is None else _indexed
        program = replace(job.program, arguments=tuple(map(quote, job.program.arguments)))
        if program.script is not None and job.data is not None:
            raise UserError(
                f"--data {job.data} is for recipes, and {program.name} is a script",
                "Give it to the script, by an option of its own after --.",
            )
        check_folders_of_recipe(job.program, "slurm")
        script = None if program.script is None else shlex.quote(_named(program.script))
        folder = job.data_folder
        data = job.data if folder is None else _named(folder)
        python = quoted(self.python or ("python" if self.container else sys.executable))
        words = (python, *program.argv(script, out=RUN_DIR, data=data and shlex.quote(data)))
        return program.title, (*self._inside(job), *words)

    def _inside(self, job: JobSpec) -> tuple[str, ...]:
        """What starts a command in the container: it sees the folders of the job as they are."""
        if self.container is None:
            return ()
        check_image(self.container)
        script = job.program.script
        given = [] if job.data_folder is None else [job.data_folder]
        given += [] if script is None else [script.resolve().parent]
        outside = {str(path.resolve()): None for path in given if inside_here(path) is None}
        binds = [BIND, BIND_RUN, *map(shlex.quote, outside)]
        has_gpus = self.gpus_per_node is not None or "gpu" in (self.gres or "")
        return (
            *("apptainer", "exec", *(["--nv"] if has_gpus else [])),
            *(f"--bind={folder}" for folder in binds),
            f"--pwd={BIND}",
            shlex.quote(_named(Path(self.container))),
        )

    def _memory(self, flag: str, text: str | None, nodes: int, tasks: int) -> int | None:
        """The MiB of each node, None where nothing is said."""
        if text is None:
            return None
        size = memory_bytes(text, flag)
        least = -(-tasks // nodes) * LEAST_MEMORY
        if size < least:
            raise UserError(
                f"{flag} {text} of each node is too small: Python and torch alone take "
                f"{least >> 20}m for the tasks there",
                "The model, its optimizer and a batch need memory as well.",
            )
        return size >> 20

    def _check_nodes(self, strategy: str, roles: Roles) -> int:
        """How many tasks the nodes have that are not for servers alone."""
        if self.ps_nodes is not None:
            self._check_apart(roles)
        if self.nodes > 1 and strategy_info(strategy).one_machine:
            raise UserError(
                f"{strategy} is for one machine, but --nodes {self.nodes} are several",
                f"Use --strategy {default_name(2, 0)}, or --nodes 1.",
            )
        here = len(roles.tasks) if self.ps_nodes is None else roles.workers
        if self.nodes > here:
            whose = "the job's" if self.ps_nodes is None else "for"
            what = "task" if self.ps_nodes is None else "worker"
            raise UserError(
                f"--nodes {self.nodes} are more than {whose} {plural(here, what)}",
                f"Add workers: --workers {self.nodes}; they count over all nodes.",
            )
        return here

    def _check_apart(self, roles: Roles) -> None:
        others = len(roles.tasks) - roles.workers
        if not roles.ps:
            raise UserError(
                f"--ps-nodes {self.ps_nodes}, but the job has no parameter servers",
                "Add some by --ps 1, or leave --ps-nodes out.",
            )
        if (self.ps_nodes or 0) > others:
            raise UserError(
                f"--ps-nodes {self.ps_nodes} are more than {plural(others, 'task')} for them",
                f"Add servers: --ps {self.ps_nodes}.",
            )
        if self.array is not None:
            raise UserError(
                f"--array {self.array} and --ps-nodes: Slurm has no arrays of jobs with two kinds "
                "of nodes",
                "Leave --ps-nodes out, or submit a job for each run.",
            )


def _named(path: Path) -> str:
    """``path`` as seen from the present folder, whole where it is outside."""
    inside = inside_here(path)
    return str(path.resolve() if inside is None else inside)


def _indexed(word: str) -> str:
    """``word`` for the shell, which puts the index in for ``{index}``."""
    parts = [part and shlex.quote(part) for part in word.split(INDEX_WORD)]
    return f'"{INDEX}"'.join(parts) or shlex.quote(word)
