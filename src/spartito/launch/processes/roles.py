"""A job whose tasks have roles: who is in it, and how much each one matters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spartito.cluster import Task, tf_config, torchrun
from spartito.errors import UserError

HOST = "127.0.0.1"
SEVERAL_MACHINES = (
    "Start them all from one shell with --hosts a,b,c, or one 'spartito run' per task, each with "
    "a TF_CONFIG that lists the addresses of all."
)

RESTARTS = 3
"""How often a task that may be started again is."""


@dataclass(frozen=True, slots=True)
class Roles:
    """How many tasks of each role the job has."""

    workers: int
    ps: int = 0
    evaluator: bool = False
    chief: bool = False

    def __post_init__(self) -> None:
        if self.ps < 0:
            raise UserError(f"--ps {self.ps} is less than 0")

    @property
    def asked(self) -> str:
        """What was asked for besides workers, as it is typed; empty when nothing was."""
        ps = [f"--ps {self.ps}"] if self.ps else []
        switches = {"--evaluator": self.evaluator, "--chief": self.chief}
        return " ".join([*ps, *(name for name, on in switches.items() if on)])

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks; the first is the coordinator."""
        return tuple(Task(role, i) for role, count in self.counts.items() for i in range(count))

    @property
    def counts(self) -> dict[str, int]:
        """How many tasks of each role there are, in order; none of a role that has none."""
        counts = {
            "chief": int(self.chief),
            "worker": self.workers,
            "ps": self.ps,
            "evaluator": int(self.evaluator),
        }
        return {role: count for role, count in counts.items() if count}

    def cluster(self, addresses: Sequence[str]) -> dict[str, list[str]]:
        """The ``cluster`` of a `TF_CONFIG`; ``addresses`` are those of all tasks, in order."""
        cluster: dict[str, list[str]] = {}
        for task, address in zip(self.tasks, addresses, strict=True):
            cluster.setdefault(task.type, []).append(address)
        return cluster

    def restarts(self, task: Task) -> int:
        """How often ``task`` is started again after it was killed from outside.

        With parameter servers all but the coordinator: the others do not stop for it.
        """
        goes_on = task.type == "evaluator" or (self.ps > 0 and task != self.tasks[0])
        return RESTARTS if goes_on else 0

    def is_vital(self, task: Task) -> bool:
        """Whether the job fails when ``task`` is lost for good."""
        return task.type == "ps" or not self.restarts(task)

    def machine_of(self, task: Task, machines: int) -> int:
        """Which of so many ``machines`` the task runs on, from 0.

        Workers in blocks, servers one by one. The chief writes and the evaluator reads the run
        folder: both are on the first.
        """
        if task.type == "worker":
            return task.index * machines // self.workers
        return task.index % machines if task.type == "ps" else 0

    def together(self, task: Task, machines: int) -> list[Task]:
        """The tasks on the same one of so many ``machines`` as ``task``, in order."""
        here = self.machine_of(task, machines)
        return [other for other in self.tasks if self.machine_of(other, machines) == here]

    def threads(self, task: Task, cores: int) -> int:
        """The threads of ``task`` when the workers, who compute, share ``cores``."""
        return max(1, cores // self.workers) if task.type == "worker" else 1

    def check(self, source: str | None) -> None:
        """Raise `UserError` where these roles cannot be.

        ``source`` is what says already who is in the job, if anything does.
        """
        if source is not None:
            if self.asked:
                raise UserError(
                    f"{self.asked}, but {source} says already who is in the job",
                    f"Leave {self.asked} out; --nnodes 1 starts a job of its own here.",
                )
            return
        if self.chief and not self.ps:
            raise UserError(
                "--chief without --ps: only with parameter servers does a task hand out the work",
                "Leave --chief out (worker 0 is the chief), or add --ps 1.",
            )


def task_environments(
    env: Mapping[str, str], roles: Roles, ports: Sequence[int]
) -> list[dict[str, str]]:
    """The environment of each task of ``roles`` on this machine; see `task_environment`.

    ``ports`` are those where the tasks listen, in order.
    """
    addresses = [f"{HOST}:{port}" for port in ports]
    return [task_environment(env, roles, addresses, task) for task in roles.tasks]


def task_environment(
    env: Mapping[str, str], roles: Roles, addresses: Sequence[str], task: Task
) -> dict[str, str]:
    """The environment of ``task``: ``env``, and a `TF_CONFIG` that says who it is.

    ``addresses`` are those of all tasks, in order. Variables of torchrun are dropped; a
    parameter server sees no GPU, so that it takes no memory of one.
    """
    base = {name: value for name, value in env.items() if name not in torchrun.VARIABLES}
    told = {"cluster": roles.cluster(addresses), "task": _named(task)}
    config = {tf_config.VARIABLE: json.dumps(told)}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if task.type == "ps" else {}
    return base | config | hidden


def _named(task: Task) -> dict[str, str | int]:
    return {"type": task.type, "index": task.index}
