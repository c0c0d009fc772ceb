"""A job in Kubernetes as one checked value: what runs, who takes part, and what each may use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import Task
from spartito.launch.file_plan import Planned
from spartito.launch.kubernetes.tpus import TpuSlice
from spartito.names import plural
from spartito.wire.addresses import address

if TYPE_CHECKING:
    from spartito.launch.kubernetes.launcher import Kubernetes

PORT = 29500
"""Where a task listens in its own pod."""

STORE = "store"
"""The role of the pod that keeps the store of a job that recovers."""

STORE_SIZE = ("500m", "512Mi")
"""The CPUs and the memory of that pod, which does not import torch."""

INDEX = "TASK_INDEX"
"""The variable with a pod's number, which stands in its `TF_CONFIG`."""

KINDS = ("job", "jobset", "trainjob")


@dataclass(frozen=True, slots=True)
class Pods(Planned):
    """A job for Kubernetes, checked: see `Kubernetes.plan`.

    ``script`` is the name and the text of a script that the file carries along; None where the
    image has it. ``out`` is a claim that is there already; None: the file claims one. ``data`` is
    a claim, ``url`` where the data is fetched from instead. With ``tpu`` each pod is a host of a
    slice, and starts a process for each device itself. ``asked`` has the rest.
    """

    asked: Kubernetes
    script: tuple[str, str] | None = None
    out: str | None = None
    data: str | None = None
    url: str | None = None
    tpu: TpuSlice | None = None
    port: int = PORT
    recovery: Recovery | None = None

    @property
    def counts(self) -> dict[str, int]:
        """The pods of each role, the store among them where there is one."""
        return self.roles.counts | ({STORE: 1} if self.recovery is not None else {})

    @property
    def pods_of_each(self) -> dict[str, int]:
        """The pods of each role that one Job has: a slice is one."""
        return {role: count // self.asked.slices for role, count in self.counts.items()}

    @property
    def who(self) -> str:
        """As `Planned.who`; the processes of pods on TPUs are told with them."""
        if self.tpu is None:
            return super(Pods, self).who  # without arguments it knows no class with slots
        tasks, pods = self.roles.workers * self.tpu.tasks, self.roles.workers
        each = f" in {pods} pods" if pods > 1 else ""
        several = f"{self.asked.slices} slices" if self.asked.slices > 1 else "a slice"
        return f"{plural(tasks, 'worker')}{each} on {several} {self.tpu.name}"

    @property
    def alone(self) -> bool:
        """Whether there is one pod, which nobody has to find."""
        return sum(self.counts.values()) == 1

    @property
    def data_ports(self) -> list[int]:
        """Where the data is fetched from; http:// may lead to https://."""
        parts = urlsplit(self.url or "")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return list(dict.fromkeys([port] if parts.scheme == "https" else [port, 443]))

    @property
    def container(self) -> str:
        """What the container of a task is called: Kubeflow wants ``node``."""
        return "node" if self.asked.kind == "trainjob" else "task"

    def size(self, role: str) -> tuple[str, str]:
        """The CPUs and the memory of a pod."""
        return STORE_SIZE if role == STORE else (self.asked.cpus, self.asked.memory)

    def host(self, role: str, index: int | str) -> str:
        """The name by which the other pods find one: host and headless service."""
        if self.asked.kind == "job":
            return f"{self.name}-{role}-{index}.{self.name}"
        return self.host_of(0, role, index)

    def host_of(self, number: int | str, role: str, index: int | str) -> str:
        """The same in the ``number``-th job of a role in a JobSet."""
        return f"{self.name}-{role}-{number}-{index}.{self.name}"

    def address(self, role: str, index: int) -> str:
        """Where a pod listens."""
        return address(self.host(role, index), self.port)

    @property
    def rendezvous(self) -> tuple[str, int]:
        """Where the tasks meet: the store, where a pod keeps it, else the first task."""
        first = self.roles.tasks[0] if self.recovery is None else Task(STORE, 0)
        return self.host(first.type, first.index), self.port

    def tf_config(self, role: str) -> str:
        """The `TF_CONFIG` of the pods of ``role``: each puts its own number into it."""
        addresses = [self.address(task.type, task.index) for task in self.roles.tasks]
        cluster = json.dumps(self.roles.cluster(addresses))
        told = f'{{"type": {json.dumps(role)}, "index": $({INDEX})}}'
        return f'{{"cluster": {cluster}, "task": {told}}}'
