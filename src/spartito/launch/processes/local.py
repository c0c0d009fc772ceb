"""Start a script as the workers of this machine, each with an environment that says who it is."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from spartito.cluster import Task, tf_config
from spartito.cluster.address_list import ENV_ADDRESS
from spartito.cluster.endpoints import open_hosts, port_range
from spartito.cluster.resolver import Joined, joined
from spartito.cluster.spec import NO_RANK, REPLICA_ROLES
from spartito.cluster.tpu import slice_of
from spartito.errors import UserError
from spartito.launch.job import Heading, JobSpec
from spartito.launch.lines.job import at_machines, line_of, machines_on
from spartito.launch.lines.line import Link
from spartito.launch.processes.fork_server import Forks
from spartito.launch.processes.gpus import count_gpus
from spartito.launch.processes.launcher import Processes
from spartito.launch.processes.process import Patience, Process, process_of, with_fractions
from spartito.launch.processes.roles import HOST, SEVERAL_MACHINES, Roles, task_environments
from spartito.launch.processes.throttle import slow_tasks
from spartito.launch.processes.tpus import of_tpu
from spartito.launch.store_keeper import kept_store
from spartito.names import ENV_SNAPSHOT_DIR
from spartito.notes import TORCH_LEVEL
from spartito.system.capacity import available_cores
from spartito.system.files import temporary_folder
from spartito.system.tpus import attached
from spartito.wire.addresses import is_loopback, split_address
from spartito.wire.ports import free_port, free_ports
from spartito.wire.secret import with_secret

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
"""glibc's settings: keep what tensors free, so that the next step finds its pages in place.

Measured on one thread against glibc's defaults: 1.15 times the steps of a convolutional network,
the same of an MLP, the same peak of memory. With 65536 for both, which gives freed memory back
at once (sharded parameters then weigh what they should), both fall to 0.55 times.
"""

RUNTIME = MALLOC | TORCH_LEVEL
"""What glibc and torch read when a process loads them, so that its launcher must say it."""

SETTINGS = RUNTIME | {"PYTHONUNBUFFERED": "1"}
"""What each process gets wherever it runs."""

MANY, MANY_PER_CORE = 64, 16
"""More processes than both numbers allow are hardly meant: each takes 300 MiB for torch alone."""

LAST_REPORT = 5.0
"""Seconds in which tasks may report to other machines whom they lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Local(Processes):
    """Start the processes of a job on this machine, and watch over them.

    ``workers`` of the job count those of this machine: one per GPU, or per device of a TPU, or
    one, by default. Where the
    environment makes this process one of several tasks (by ``TF_CONFIG``, Slurm, ``mpirun``, ...)
    and ``nnodes`` is not given, it joins their job: each task becomes so many processes. Servers,
    an evaluator and a chief start on this machine only; each task then reads in its own
    ``TF_CONFIG`` who is in the job.

    Args:
        nnodes: the machines in the job.
        node_rank: which of them this is.
        master_addr: where they meet, as ``host:port``.
        share_devices: whether tasks share accelerators where there are more tasks than devices.
        mixed: whether tasks that update together may compute on devices of several kinds.
        slow: tasks that run only a fraction of the time, as ``worker:1=0.25``.
        link: the line at which each task is on a machine of its own, as ``100mbit,50ms``: network
            namespaces, which need root. Such a job starts on this machine only.
        log_dir: a folder where what each task prints goes into a file as well.
        log_format: ``"text"``, or ``"json"``: an object for each line that a task prints.
        notice: seconds until a task that stands still is named; None: ``SPARTITO_NOTICE``, or 5.
        yes: whether to start far more processes than cores; without it a terminal is asked.
        recover: whether a worker that is killed is started again, and gets its state from the
            others, which go on (`Recovery`).
        min_workers: how many go on at least where no replacement comes; None: all.
        wait: seconds for a replacement; 30 by default.
        restarts: how often each worker is started again; 3 by default.
        result: whether the last line that the first process prints to stdout is the result of the
            job: it is printed last, without the task's name.
        environment: what the tasks inherit; this process's own environment by default.
        private: folders of the job, which are removed at its end, even when we are killed.
        on_end: called when all tasks have ended, with the failure that ended the job, if any; its
            traceback is then not shown.
        forks: what tasks may be forked by.
    """

    nnodes: int | None = Heading.MACHINES.option(
        "Machines in the job, where you start each by hand; 1 for a job of its own inside a "
        "scheduler's task.",
        least=1,
    )
    node_rank: int = Heading.MACHINES.option(
        "With --nnodes: which of them this is, from 0.", 0, least=0
    )
    master_addr: str | None = Heading.MACHINES.option(
        "With --nnodes: where they meet, the first machine.", metavar="HOST:PORT"
    )
    slow: tuple[str, ...] = Heading.ADVANCED.option(
        "Let a task run a fraction of the time only, as worker:1=0.25; for trials.",
        (),
        metavar="TASK=FRACTION",
    )
    link: str | None = Heading.ADVANCED.option(
        "Put each task on a machine of its own (a network namespace: needs root), at a line of "
        "this rate and delay, as 100mbit or 10mbit,50ms; for trials.",
        metavar="RATE[,DELAY]",
    )
    forks: Forks = field(default_factory=Forks)

    def start(self, job: JobSpec) -> int:
        """Start the processes, and follow them to their end.

        Args:
            job: what is to run.

        Returns:
            The exit code of the job.

        Raises:
            UserError: the job cannot run so; nothing was started.
        """
        variables, slow = self.variables(job), slow_tasks(self.slow)
        job.program.check()
        allowed = port_range(variables)
        joins = joined(variables) if self.nnodes is None else None
        source = None if joins is None else joins.source
        machines = 1 if self.nnodes is None else self.nnodes
        asked = job.workers_on(machines) if joins is None else job.workers
        roles = job.roles(_count_workers(asked, variables, joins))
        check_number(len(roles.tasks), available_cores(), self.yes)
        if roles.asked and (machines > 1 or self.master_addr is not None):
            raise UserError(f"{roles.asked} starts on one machine only", SEVERAL_MACHINES)
        if self.link is not None:
            alone = self.nnodes is None and self.master_addr is None and joins is None
            return self._start_on(line_of(self.link, alone, self.recover), job, roles, variables)
        with ExitStack() as held:  # the job's ports
            if joins is None:
                at = None if roles.asked else held
                position = _position(machines, self.node_rank, self.master_addr, allowed, at)
            elif self.master_addr is None:
                position = _position_in(joins, roles.workers, allowed, held)
            else:
                raise UserError(
                    f"--master-addr {self.master_addr}, but {source} says already that this is "
                    f"{joins.task}",
                    "Leave it out; or give --nnodes and --node-rank as well.",
                )
            servers = len(joins.spec.addresses.get("ps", ())) if joins and joins.spec else None
            count, here = position.nodes * roles.workers, position.locals * roles.workers
            strategy = job.choose(
                roles, count, here, servers=servers, env=variables, source=source
            ).name
            if position.task is None and position.nodes == 1:
                variables = with_secret(variables)  # else others start the rest of the job
            if position.node == position.local == 0:
                self.check_folder(job, variables)
                self.warn(job, _open_hosts(position, joins), variables)
            of_slice, odd = _of_tpu(variables, position, roles)
            variables |= of_slice
            for note in (*_notes(position, roles.workers), *([odd] if odd else [])):
                self.say(f"note: {note}")
            command = [sys.executable, *job.argv()]
            if self.keeps_store(roles) and position.task is None and position.nodes == 1:
                variables = held.enter_context(kept_store(variables))
            with snapshots(roles, variables) as (folder, variables):
                started = _processes(command, variables, position, roles, slow, held)
                started = self.recovering(started, strategy, roles)
                # Elsewhere nobody sees what fails here unless one of our tasks says it.
                others = position.nodes > position.locals
                patience = Patience(report=LAST_REPORT) if others else Patience()
                return self.follow(
                    started, job, variables, folder, forks=self.forks, patience=patience
                )

    def _start_on(self, link: Link, job: JobSpec, roles: Roles, env: dict[str, str]) -> int:
        """Start each task on a machine of its own, at that line."""
        job.choose(roles, here=1, env=env)
        slow, cores = slow_tasks(self.slow), available_cores()
        with machines_on(link, roles) as machines, snapshots(roles, with_secret(env)) as found:
            folder, env = found
            self.check_folder(job, env)
            self.warn(job, [machine.address for machine in machines], env)
            settings = [defaults(roles.threads(task, cores)) for task in roles.tasks]
            command = [sys.executable, *job.argv()]
            started = at_machines(machines, roles, command, env, settings, slow)
            # Each machine has a /dev/shm of its own.
            beside = temporary_folder()
            return self.follow(started, job, env, folder, forks=self.forks, beside=beside)


@contextmanager
def snapshots(roles: Roles, env: dict[str, str]) -> Iterator[tuple[str | None, dict[str, str]]]:
    """A folder of the job for its servers' snapshots, and ``env`` that names it.

    None where there are no servers, or ``env`` names one that is the user's.
    """
    if not roles.ps or env.get(ENV_SNAPSHOT_DIR):
        yield None, env
        return
    with tempfile.TemporaryDirectory(prefix="spartito-", ignore_cleanup_errors=True) as folder:
        yield folder, env | {ENV_SNAPSHOT_DIR: folder}


def _processes(
    command: Sequence[str],
    env: Mapping[str, str],
    position: Position,
    roles: Roles,
    slow: Mapping[str, float],
    held: ExitStack,
) -> list[Process]:
    """What starts here; the first is the coordinator."""
    if roles.asked:
        environs = role_environments(env, roles, held=held)
        started = [
            process_of(task, roles, command, own)
            for task, own in zip(roles.tasks, environs, strict=True)
        ]
    else:
        started = [
            Process(position.name(local, roles.workers), command, environment)
            for local, environment in enumerate(environments(env, position, roles.workers))
        ]
    return with_fractions(started, slow)


@dataclass(frozen=True, slots=True)
class Position:
    """Which launcher of the job this is: the ``node``-th of ``nodes``, which meet at ``host:port``.

    Several launchers may share a machine (two tasks of a `TF_CONFIG` on one host): this one is
    the ``local``-th of ``locals`` there. ``task`` is the one that we are already, if any; with
    ``itself`` the process that starts here is that task, as its environment says. ``address`` is
    the task's own, where it is known.
    """

    node: int
    nodes: int
    host: str
    port: int
    local: int = 0
    locals: int = 1
    task: Task | None = None
    itself: bool = False
    address: str = ""

    @property
    def trains(self) -> bool:
        """Whether what starts here are replicas, not a job's ps or evaluator."""
        return self.task is None or self.task.type in REPLICA_ROLES

    def name(self, index: int, workers: int) -> str:
        """What the ``index``-th process here is called."""
        if self.task is not None and (workers == 1 or not self.trains):
            return str(self.task)
        return f"worker {self.node * workers + index}"


def environments(
    env: Mapping[str, str], position: Position, workers: int, usable: int | None = None
) -> list[dict[str, str]]:
    """The environment of each of the ``workers`` processes: ``env``, and who the process is.

    The names are torchrun's. Cores (``usable``, by default those of this process) are shared
    out as threads, unless ``env`` says otherwise.
    """
    if position.itself:
        return [SETTINGS | dict(env)]
    here = position.locals * workers
    cores = available_cores() if usable is None else usable
    base = defaults(max(1, cores // here)) | {n: v for n, v in env.items() if n != ENV_ADDRESS}
    if not position.trains:
        # Such a task has no rank: its environment says all, and it is one process.
        return [base | _address(position, env, 0)]
    if position.task is None or workers > 1:
        base.pop(tf_config.VARIABLE, None)
    return [
        base
        | {
            "RANK": str(position.node * workers + index),
            "WORLD_SIZE": str(position.nodes * workers),
            "LOCAL_RANK": str(position.local * workers + index),
            "LOCAL_WORLD_SIZE": str(here),
            "GROUP_RANK": str(position.node),
            "MASTER_ADDR": position.host,
            "MASTER_PORT": str(position.port),
        }
        | _address(position, env, index)
        for index in range(workers)
    ]


def replica_environment(env: Mapping[str, str], workers: int) -> dict[str, str]:
    """What the first replica of a job of ``workers`` has on this machine, where all of them are."""
    return environments(env, Position(0, 1, HOST, 0), workers)[0]


def _address(position: Position, env: Mapping[str, str], index: int) -> dict[str, str]:
    """Where the ``index``-th process here listens: the first one, at the launcher's own address."""
    own = position.address or env.get(ENV_ADDRESS, "")
    return {ENV_ADDRESS: own} if index == 0 and own else {}


def role_environments(
    env: Mapping[str, str],
    roles: Roles,
    usable: int | None = None,
    held: ExitStack | None = None,
) -> list[dict[str, str]]:
    """The environment of each task of ``roles``: ``env``, and a `TF_CONFIG` that says who it is.

    Ports are free ones of this machine, the job's until ``held`` closes. Cores are shared out as
    in `environments`.
    """
    cores = available_cores() if usable is None else usable
    ports = free_ports(len(roles.tasks), HOST, port_range(env), held)
    said = task_environments(env, roles, ports)
    return [
        defaults(roles.threads(task, cores)) | own
        for task, own in zip(roles.tasks, said, strict=True)
    ]


def defaults(threads: int) -> dict[str, str]:
    """What each process gets unless the user's environment says otherwise."""
    return SETTINGS | {"OMP_NUM_THREADS": str(threads)}


def _position(
    nnodes: int,
    node_rank: int,
    master_addr: str | None,
    allowed: range | None,
    held: ExitStack | None,
) -> Position:
    """What the arguments say, else this machine alone, at one of the ports that are ``allowed``."""
    if nnodes < 1:
        raise UserError(f"--nnodes {nnodes} is less than 1")
    if not 0 <= node_rank < nnodes:
        raise UserError(
            f"--node-rank {node_rank} is out of range: --nnodes {nnodes} allows 0 to {nnodes - 1}",
            "Say how many machines there are, as --nnodes 2; their ranks begin at 0.",
        )
    if master_addr is not None:
        host, port = split_address(master_addr)
        return Position(node_rank, nnodes, host, port)
    if nnodes > 1:
        raise UserError(
            f"--nnodes {nnodes} needs an address where the machines meet",
            "Give each the address of the first: --master-addr host:29500",
        )
    return Position(0, 1, HOST, free_port(allowed=allowed, held=held))


def _position_in(job: Joined, workers: int, allowed: range | None, held: ExitStack) -> Position:
    """The position of a launcher with so many ``workers`` that is one of the tasks of ``job``."""
    itself = workers == 1 and job.source != tf_config.VARIABLE
    spec = job.spec
    if spec is None or spec.rendezvous is None:
        port = free_port(allowed=allowed, held=held)
        return Position(0, 1, HOST, port, task=job.task, itself=itself)
    host, port = split_address(spec.rendezvous)
    if spec.rank == NO_RANK:
        return Position(0, 1, host, port, task=job.task, itself=itself)
    counts = spec.rank, spec.world_size, host, port, spec.local_rank, spec.local_size
    own = spec.address_of(spec.task)
    return Position(*counts, task=job.task, itself=itself, address=own)


def _count_workers(workers: int | None, env: Mapping[str, str], job: Joined | None) -> int:
    """As asked, else one per accelerator; one in tasks that share a machine or have servers."""
    if job is not None and not job.divisible and (workers or 1) > 1:
        raise UserError(
            f"--workers {workers}, but each task of {job.source} is one process",
            "Leave --workers out, and start more tasks.",
        )
    if workers is not None:
        return workers
    own = job is None or (job.divisible and not job.shares_machine)
    return max(1, count_gpus(env) or _count_tpus()) if own else 1


def _count_tpus() -> int:
    found = attached()
    return 0 if found is None else found.devices


def _of_tpu(env: Mapping[str, str], position: Position, roles: Roles) -> tuple[dict[str, str], str]:
    """What the processes that start here hear of a TPU of this machine, and what is odd of it."""
    alone = position.trains and position.locals == 1 and not roles.asked
    found = attached() if alone else None
    if found is None:
        return {}, ""
    return of_tpu(env, found, slice_of(env), position.nodes, roles.workers)


def check_number(processes: int, cores: int, yes: bool, where: str = "this machine") -> None:
    """Ask whether so many ``processes`` on so few ``cores`` are meant, unless ``yes``.

    Raises `UserError` where nobody can be asked, or says no.
    """
    if yes or processes <= max(MANY, MANY_PER_CORE * cores):
        return
    what = f"{processes} processes for the {cores} cores of {where}"
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(f"{what} are more than we start unasked", "If they are meant: --yes.")
    print(f"spartito: {what}: start them all? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError(f"{what}: nothing was started", "Give --workers a smaller number.")


def _open_hosts(position: Position, joins: Joined | None) -> list[str]:
    """Where the job's tasks listen that others reach."""
    if joins is not None and joins.spec is not None:
        return open_hosts(joins.spec)
    return [] if is_loopback(position.host) else [position.host]


def _notes(position: Position, workers: int) -> list[str]:
    """What is allowed, but worth a line."""
    notes = []
    cores = available_cores()
    if position.locals * workers > cores:
        notes.append(f"{position.locals * workers} workers share {cores} cores")
    if position.task is None and position.nodes > 1 and is_loopback(position.host):
        notes.append(
            f"{position.host} is each machine itself, so all {position.nodes} nodes must run on "
            "this one"
        )
    return notes
