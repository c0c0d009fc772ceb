"""The cluster as one value: every task with its address, and the task that we are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from spartito.errors import UserError
from spartito.names import nearest
from spartito.wire.addresses import machine_of, split_address

ROLES = ("chief", "worker", "ps", "evaluator")
"""What a task can be."""

EVALUATOR = "evaluator"
"""The role that does not train, and evaluates the checkpoints."""

REPLICA_ROLES = ("chief", "worker")
"""The roles that train, in rank order."""

NO_RANK = -1
"""The rank of a task that does not train (ps, evaluator)."""


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One process of the job, as ``worker 1``.

    Attributes:
        type: Its role: "chief", "worker", "ps" or "evaluator".
        index: Its number among those of this role, from 0.
    """

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type} {self.index}"


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """All tasks of the job, and which of them this process is.

    Attributes:
        addresses: The ``host:port`` of every task by role, ``""`` where unknown.
        task: The task that this process is.
        rank: Its number among the tasks that train, the chief first, then the workers; -1 for a
            task that does not train.
        world_size: How many tasks train.
        local_rank: Its number among those that train on this machine; -1 as for ``rank``.
        local_size: How many train on this machine.
        rendezvous: The ``host:port`` where the tasks meet, None when alone.
        source: Where all this was read, for messages.
        absent: Tasks that train no more: they were lost, and the others go on without them.

    Raises:
        UserError: For values that cannot be one cluster.
    """

    addresses: Mapping[str, tuple[str, ...]]
    task: Task
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    rendezvous: str | None
    source: str
    absent: tuple[Task, ...] = ()

    def __post_init__(self) -> None:
        own = {role: tuple(tasks) for role, tasks in self.addresses.items()}
        object.__setattr__(self, "addresses", own)
        for rule, holds in self._rules():
            if not holds:
                raise UserError(f"{self.source} says {self._figures()}, but {rule}")

    @classmethod
    def alone(cls) -> Self:
        """The cluster of one process that is not part of a job."""
        return cls({"worker": ("",)}, Task("worker", 0), 0, 1, 0, 1, None, "no cluster")

    @property
    def is_chief(self) -> bool:
        """Whether this task writes files and prints: the chief, or worker 0 where none is."""
        return self.rank == 0 and self.task.type in REPLICA_ROLES

    @property
    def is_evaluator(self) -> bool:
        """Whether this task stands outside the training and evaluates its checkpoints."""
        return self.task.type == EVALUATOR

    @property
    def spans_hosts(self) -> bool:
        """Whether tasks run on several hosts, as far as addresses or local ranks tell."""
        addresses = [address for tasks in self.addresses.values() for address in tasks]
        if all(addresses):
            return len({machine_of(split_address(address)[0]) for address in addresses}) > 1
        return self.local_size < self.world_size

    @property
    def has_evaluator(self) -> bool:
        """Whether a task of its own evaluates the checkpoints."""
        return bool(self.addresses.get(EVALUATOR))

    def apart(self) -> Self:
        """The cluster of this evaluator for its own work: it is alone, and nobody's chief."""
        own = {EVALUATOR: (self.address_of(self.task),)}
        return type(self)(own, Task(EVALUATOR, 0), 0, 1, 0, 1, None, self.source)

    def part(self, ranks: Sequence[int]) -> Self:
        """The cluster that some of the tasks that train are, as if there were no others.

        Args:
            ranks: Theirs, in rising order; this task is one of them. Those of a machine follow one
                another.

        Returns:
            With ranks anew, and names as before.
        """
        first = self.rank - self.local_rank
        near = [rank for rank in ranks if first <= rank < first + self.local_size]
        tasks = enumerate(self.replica_tasks)
        return replace(
            self,
            absent=(*self.absent, *(task for rank, task in tasks if rank not in ranks)),
            rank=ranks.index(self.rank),
            world_size=len(ranks),
            local_rank=near.index(self.rank),
            local_size=len(near),
        )

    @property
    def replica_tasks(self) -> tuple[Task, ...]:
        """The tasks that train, in rank order; of an evaluator `apart`, itself."""
        if not self.absent:
            return self.all_replica_tasks
        return tuple(task for task in self.all_replica_tasks if task not in self.absent)

    @property
    def all_replica_tasks(self) -> tuple[Task, ...]:
        """The same, with those that are absent."""
        trains = any(self.addresses.get(role) for role in REPLICA_ROLES)
        return tuple(
            Task(role, index)
            for role in (REPLICA_ROLES if trains else (EVALUATOR,))
            for index in range(len(self.addresses.get(role, ())))
        )

    @property
    def num_computing(self) -> int:
        """How many replicas compute gradients: beside parameter servers a chief computes none."""
        served = bool(self.addresses.get("ps"))
        return sum(not served or task.type == "worker" for task in self.replica_tasks)

    def task_of(self, rank: int) -> Task:
        """The task with this rank.

        Args:
            rank: A number from 0 to ``world_size`` - 1.

        Returns:
            Its role and index.
        """
        return self.replica_tasks[rank]

    def address_of(self, task: Task) -> str:
        """Where a task listens.

        Args:
            task: A task of this cluster.

        Returns:
            Its ``host:port``, ``""`` where unknown.
        """
        return self.addresses[task.type][task.index]

    def name_of(self, rank: int) -> str:
        """How messages name a task.

        Args:
            rank: A number from 0 to ``world_size`` - 1.

        Returns:
            As ``worker 1 (10.0.0.2:29500)``, with the address when it is known.
        """
        task = self.task_of(rank)
        address = self.address_of(task)
        return f"{task} ({address})" if address else str(task)

    def _figures(self) -> str:
        return (
            f"task {self.task}, rank {self.rank} of {self.world_size}, "
            f"local rank {self.local_rank} of {self.local_size}"
        )

    def _rules(self) -> list[tuple[str, bool]]:
        replicas = self.replica_tasks
        listed = self.task.index in range(len(self.addresses.get(self.task.type, ())))
        trains = self.task.type in REPLICA_ROLES or self.task in replicas
        ranked = (
            self.rank in range(len(replicas)) and replicas[self.rank] == self.task
            if trains
            else self.rank == self.local_rank == NO_RANK
        )
        local = not trains or (
            0 <= self.local_rank < self.local_size
            and self.local_rank <= self.rank
            and self.local_size - self.local_rank <= self.world_size - self.rank
        )
        unknown = [role for role in self.addresses if role not in ROLES]
        return [
            (f"{unknown} is no role. {nearest(str(unknown[:1]), ROLES)}", not unknown),
            ("a job needs a chief or a worker", bool(replicas)),
            ("a job has at most one chief", len(self.addresses.get("chief", ())) <= 1),
            ("a job has at most one evaluator", len(self.addresses.get(EVALUATOR, ())) <= 1),
            ("that task is not in the cluster", listed),
            (f"the cluster lists {len(replicas)} that train", self.world_size == len(replicas)),
            ("the rank does not belong to that task", ranked),
            ("the local rank does not fit into the ranks", local),
            (
                "several replicas need an address where they meet",
                self.world_size == 1 or bool(self.rendezvous),
            ),
        ]
