"""The launcher of jobs in containers: it checks what is asked for and writes the compose files."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from spartito.cluster.endpoints import parse_range
from spartito.errors import UserError
from spartito.launch.containers.compose import write_files
from spartito.launch.containers.plan import (
    CONTAINER_USER,
    IMAGE,
    JOB_NAME,
    LEAST_MEMORY,
    Containers,
    Limits,
    Network,
    memory_bytes,
)
from spartito.launch.file_plan import FileLauncher, check_text
from spartito.launch.hosts.names import parse_hosts
from spartito.launch.images import check_image
from spartito.launch.job import JobSpec, check_folders_of_recipe, option
from spartito.launch.processes.roles import Roles
from spartito.launch.recovery_options import Recovering
from spartito.launch.target import check_data, seen_from_here
from spartito.registry import default_name, strategy_info
from spartito.system.capacity import available_cores
from spartito.urls import is_remote


@dataclass(frozen=True, slots=True, kw_only=True)
class Compose(Recovering, FileLauncher[Containers]):
    """Write the compose file of a job; redirect it into a file.

    Example: spartito cluster compose mnist --workers 2 -- --epochs 3 > compose.yaml

    Args:
        gpus: whether each worker gets a GPU of its own.
        cpus: the CPUs of each worker, one number for all, or one for each with commas.
        memory: the memory of each task, as ``2g``.
        image: what all run.
        host_network: whether containers have the machine's network.
        share_ipc: whether they have one /dev/shm.
        hosts: several machines, as ``a,b,c``.
        into: the folder for their files.
        timeout: how long a task waits for another, in seconds.
        recover: whether a worker that is killed is started again, and gets its state from the
            others, which go on.
        min_workers: how many go on at least where no replacement comes; None: all.
        wait: seconds for a replacement; 30 by default.
        restarts: how often each worker is started again; 3 by default.
    """

    gpus: bool = option("A GPU for each worker.", False)
    cpus: str | None = option("CPUs of each worker: 0.5, or 0.5,1 one by one.", metavar="LIST")
    memory: str | None = option("Memory of each task, as 2g.", metavar="SIZE")
    image: str = option("The image that all run.", IMAGE, metavar="NAME")
    host_network: bool = option("The machine's own network, not a bridge.", False)
    share_ipc: bool = option("One /dev/shm for all, so that they share memory.", False)
    hosts: str | None = option("Several machines, as a,b,c: a file for each.", metavar="LIST")
    into: Path | None = option("With --hosts: the folder for the files.", metavar="DIR")
    timeout: int = option("Seconds that a task waits for another.", 300, least=1)

    def write(self, planned: Containers) -> None:
        """As `FileLauncher.write`: print it, or with ``hosts`` write one for each machine.

        Args:
            planned: what it says.

        Raises:
            UserError: one of ``hosts`` and ``into`` alone.
        """
        if (self.hosts is None) != (self.into is None):
            raise UserError(
                "--hosts and --into go together: several machines are several files",
                "Write --hosts a,b,c --into DIR.",
            )
        write_files(planned, self.into)

    def plan(self, job: JobSpec) -> Containers:
        program, roles = job.program, job.roles()
        check_text((program.name, *program.arguments))
        check_image(self.image)
        chosen = job.choose(roles)
        self._check_machine(chosen.name, roles)
        if self.recover and roles.ps:
            raise UserError(
                "--recover with parameter servers in containers: the chief's journal is on no "
                "volume there",
                "Leave it out: all but the first task are started again without it.",
            )
        self.check_recovers(chosen.name, roles)
        if self.recover and self.share_ipc:
            raise UserError(
                "--recover with --share-ipc: the first container has the memory of all",
                "Leave --share-ipc out.",
            )
        machines = _machines(self.hosts, roles)
        about, script = program.title, program.script
        own = re.sub(r"[^a-z0-9_-]+", "-", about.lower().removesuffix(".py")).strip("-_")
        name = job.name or own
        if not JOB_NAME.fullmatch(name):
            raise UserError(
                f"--name {name!r} cannot name containers",
                "Use small letters, digits, - and _, with a letter or a digit first.",
            )
        if job.data is not None and is_remote(job.data):
            raise UserError(
                f"--data {job.data}: containers of a recipe get a folder, and no keys of a store",
                "Name a folder, or start the recipe by 'spartito train' or ssh.",
            )
        given = job.data_folder
        is_file = given is not None and given.is_file()  # its folder is mounted
        folder = given.parent if given is not None and is_file else given
        check_data(folder)
        check_folders_of_recipe(program, "compose")

        def named(path: Path) -> str:
            return str(path.resolve()) if machines else seen_from_here(path)

        there = None if script is None else f"/scripts/{script.name}"
        data = None if given is None else f"/data/{given.name}" if is_file else "/data"
        containers = Containers(
            name=name,
            about=about,
            command=("python", *program.argv(there, out="/runs", data=data)),
            strategy=chosen,
            roles=roles,
            out=named(job.out or Path("runs") / name),
            image=self.image,
            scripts=None if script is None else named(script.parent),
            data=None if folder is None else named(folder),
            limits=Limits(_cpus(self.cpus, roles.workers), _memory(self.memory), self.gpus),
            network=Network(self.host_network or bool(machines), self.share_ipc, machines),
            cores=available_cores(),
            user=CONTAINER_USER if os.getuid() == 0 else f"{os.getuid()}:{os.getgid()}",
            timeout=self.timeout,
            ports=None if job.ports is None else parse_range(job.ports, "--ports"),
            insecure=job.insecure,
            recovery=self.recovery if roles.workers > 1 else None,
            restarts=self.restarts_of_each,
        )
        _check_ports(containers)
        return containers

    def _check_machine(self, strategy: str, roles: Roles) -> None:
        lacking = self.lacks(strategy)
        if roles.workers > 1 and lacking:
            raise UserError(
                f"{strategy} is for one machine, and each container is a machine of its own",
                f"Use --strategy {default_name(2, 0)} (with --share-ipc it uses shared memory "
                f"too), or on a single machine {' '.join(lacking)}.",
            )

    def lacks(self, strategy: str) -> list[str]:
        """What several workers lack to be one machine.

        Args:
            strategy: the name of the strategy.

        Returns:
            The missing options; none where the strategy needs no single machine.
        """
        info = strategy_info(strategy)
        alone = self.hosts is None
        have = {"--host-network": self.host_network and alone, "--share-ipc": self.share_ipc}
        need = {"--host-network": info.one_machine, "--share-ipc": info.shares_memory}
        needs = info.most_replicas != 1
        return [option for option in have if needs and need[option] and not have[option]]


def _check_ports(job: Containers) -> None:
    """Raise `UserError` where the tasks of a machine need more ports than are allowed."""
    most = max(len(job.together(task)) for task in job.roles.tasks) if job.network.host else 1
    most += bool(job.network.host and job.recovery)
    if job.ports is not None and len(job.ports) < most:
        raise UserError(
            f"--ports {job.ports[0]}-{job.ports[-1]} are {len(job.ports)} for {most} tasks of one "
            "machine",
            "Allow one for each task.",
        )


def _cpus(text: str | None, workers: int) -> tuple[float, ...]:
    """One number of CPUs for each worker."""
    if text is None:
        return ()
    try:
        given = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--cpus {text} is no list of numbers", "Write 0.5 or 0.5,1.") from None
    if not all(math.isfinite(count) and count >= 0.01 for count in given):
        raise UserError(f"--cpus {text}: a container has 0.01 CPUs or more")
    if len(given) not in (1, workers):
        raise UserError(
            f"--cpus {text} has {len(given)} numbers for {workers} workers",
            "Give one number for all workers, or one for each.",
        )
    return given * workers if len(given) == 1 else given


def _memory(text: str | None) -> str | None:
    if text is None:
        return None
    if memory_bytes(text) < LEAST_MEMORY:
        raise UserError(
            f"--memory {text} is too small: Python and torch alone take {LEAST_MEMORY >> 20}m",
            "The model, its optimizer and a batch need memory as well: --memory 1g, for example.",
        )
    return f"{memory_bytes(text) >> 20}m"


def _machines(text: str | None, roles: Roles) -> tuple[str, ...]:
    """The machines' names of a list with commas."""
    if text is None:
        return ()
    names = parse_hosts(text)
    if "@" in text:
        raise UserError(f"--hosts {text} names users", "Containers need none: write a,b,c.")
    if len(names) > len(roles.tasks) or len(names) > max(roles.workers, roles.ps):
        raise UserError(
            f"--hosts {text} are {len(names)} machines, too many for the job's "
            f"{roles.workers} workers and {roles.ps} ps",
            f"Add workers: --workers {len(names)}.",
        )
    return names
