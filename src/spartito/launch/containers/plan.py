"""A job in containers as one checked value: what runs, who takes part, and what each may use."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import Task
from spartito.errors import UserError
from spartito.launch.file_plan import Planned
from spartito.launch.processes.roles import RESTARTS

IMAGE = "spartito"
PORT = 29500
"""Where a task listens in its own container; on a shared network the next ones follow."""

LEAST_MEMORY = 300 << 20
"""Bytes that one task takes before it has a model: Python and torch."""

CONTAINER_USER = "1000:1000"
"""Who runs in the container when root asks: never root."""

STORE = "store"
"""The service that keeps a job's store."""

UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
JOB_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the containers may use; None and empty mean all that the machine has.

    ``cpus`` has one number per worker; ``memory`` is the engine's word for the bytes of each
    task, as ``2g``. With ``gpus`` every worker gets a GPU of its own.
    """

    cpus: tuple[float, ...] = ()
    memory: str | None = None
    gpus: bool = False


@dataclass(frozen=True, slots=True)
class Network:
    """How the containers reach each other.

    A private bridge by default; ``host`` gives them the machine's own network, ``ipc`` one
    /dev/shm for all. ``machines`` are the names of several machines, empty for this one.
    """

    host: bool = False
    ipc: bool = False
    machines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Containers(Planned):
    """A job in containers, checked: see `Compose.plan`.

    ``scripts``, ``data`` and ``out`` are folders of the machine, as the file will name them.
    ``cores`` are those of one machine, ``user`` is who runs in the container. ``ports`` are those
    at which tasks may listen, None where that is left to us. With a ``recovery`` each worker is
    started again ``restarts`` times.
    """

    out: str
    image: str = IMAGE
    scripts: str | None = None
    data: str | None = None
    limits: Limits = Limits()
    network: Network = Network()
    cores: int = 1
    user: str = CONTAINER_USER
    ports: range | None = None
    recovery: Recovery | None = None
    restarts: int = RESTARTS

    @property
    def store(self) -> tuple[str, int] | None:
        """Where a job that goes on without a task has its store: beside those of the first machine.

        None where the leader keeps it.
        """
        if self.recovery is None:
            return None
        first = self.ports[0] if self.ports else PORT
        if not self.network.host:
            return STORE, first
        beside = len(self.together(self.leader))
        return self.machine_of(self.leader) or "127.0.0.1", first + beside

    @property
    def leader(self) -> Task:
        """The task where the others meet, and whose exit code is the job's."""
        return self.roles.tasks[0]

    def machine_of(self, task: Task) -> str:
        """The machine that ``task`` runs on, ``""`` for this one; see `Roles.machine_of`."""
        machines = self.network.machines or ("",)
        return machines[self.roles.machine_of(task, len(machines))]

    def together(self, task: Task) -> list[Task]:
        """The tasks on the machine of ``task``, in order."""
        return self.roles.together(task, len(self.network.machines or ("",)))

    def address(self, task: Task) -> tuple[str, int]:
        """Where ``task`` listens: a service on the bridge, else a port of its machine."""
        first = self.ports[0] if self.ports else PORT
        if not self.network.host:
            return service(task), first
        return self.machine_of(task) or "127.0.0.1", first + self.together(task).index(task)

    def threads(self, task: Task) -> int:
        """How many threads ``task`` computes with."""
        if task.type != "worker":
            return 1
        if self.limits.cpus:
            return max(1, math.ceil(self.limits.cpus[task.index]))
        beside = [t for t in self.together(task) if t.type == "worker"]
        return max(1, self.cores // len(beside))


def service(task: Task) -> str:
    """What the task's service is called: ``worker-1``, or ``chief`` where there is only one."""
    return task.type if task.type in ("chief", "evaluator") else f"{task.type}-{task.index}"


def memory_bytes(text: str, option: str = "--memory") -> int:
    """The bytes that an engine's word such as ``512m`` or ``2g`` means; `UserError` if none.

    ``option`` is where it was given.
    """
    found = MEMORY.fullmatch(text.strip())
    if found is None:
        raise UserError(f"{option} {text!r} is no amount of memory", "Write it as 512m or 2g.")
    return int(float(found[1]) * UNITS[found[2].lower()])
