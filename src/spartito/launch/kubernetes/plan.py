"""A job for Kubernetes as one checked value: what runs, who takes part, and what each may use."""

from __future__ import annotations

import json
from dataclasses import dataclass

from spartito.cluster.listed import address
from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import Task
from spartito.launch.roles import RESTARTS, Roles

PORT = 29500
"""Where a task listens in its own pod."""

STORE = "store"
"""The role of the pod that keeps the store of a job that recovers."""

INDEX = "TASK_INDEX"
"""The variable with a pod's number, which stands in its `TF_CONFIG`."""

KINDS = ("job", "jobset", "trainjob")


@dataclass(frozen=True, slots=True)
class Pods:
    """A job for Kubernetes, checked: see `Kubernetes.plan`.

    ``command`` is what every task runs; ``about`` says in a word what that is. ``script`` is the
    name and the text of a script that the file carries along; None where the image has it.
    ``out`` is a claim that is there already; None: the file claims one. ``cpus`` and ``memory``
    are those of each pod, as Kubernetes writes them. ``data`` is a claim, ``url`` where the data
    is fetched from instead.
    """

    name: str
    kind: str
    about: str
    command: tuple[str, ...]
    strategy: str
    roles: Roles
    image: str
    cpus: str
    memory: str
    strategy_options: str | None = None
    script: tuple[str, str] | None = None
    out: str | None = None
    storage: str = "10Gi"
    storage_class: str | None = None
    data: str | None = None
    url: str | None = None
    gpus: bool = False
    queue: str | None = None
    namespace: str | None = None
    timeout: float = 600.0
    port: int = PORT
    insecure: bool = False
    recovery: Recovery | None = None
    restarts: int = RESTARTS

    @property
    def counts(self) -> dict[str, int]:
        """The pods of each role, the store among them where there is one."""
        found: dict[str, int] = {}
        for task in self.roles.tasks:
            found[task.type] = found.get(task.type, 0) + 1
        return found | ({STORE: 1} if self.recovery is not None else {})

    @property
    def meets(self) -> bool:
        """Whether tasks meet at all."""
        return sum(task.type != "evaluator" for task in self.roles.tasks) > 1

    @property
    def container(self) -> str:
        """What the container of a task is called: Kubeflow wants ``node``."""
        return "node" if self.kind == "trainjob" else "task"

    @property
    def is_one_object(self) -> bool:
        """Whether the job fails as a whole: one Job, or the Jobs of a set."""
        return self.kind != "job" or len(self.counts) == 1

    def host(self, role: str, index: int | str) -> str:
        """The name by which the other pods find one: host and headless service."""
        number = index if self.kind == "job" else f"0-{index}"
        return f"{self.name}-{role}-{number}.{self.name}"

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
        cluster: dict[str, list[str]] = {}
        for task in self.roles.tasks:
            cluster.setdefault(task.type, []).append(self.address(task.type, task.index))
        told = f'{{"type": {json.dumps(role)}, "index": $({INDEX})}}'
        return f'{{"cluster": {json.dumps(cluster)}, "task": {told}}}'
