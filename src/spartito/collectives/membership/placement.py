"""Which replicas are on which machine, and which one is the leader there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from spartito.cluster.spec import ClusterSpec
from spartito.notes import note
from spartito.system import shares_memory, why_not_shared

PROCESS_GROUP = ("ddp", "fsdp", "process_group")
"""What ``communication`` may be that means torch's process groups on CPUs too."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks on each machine in rising order; the machines in the order of their first rank.

    The first rank of a machine is its leader, so rank 0 is that of the first machine.
    """

    machines: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, hosts: Sequence[str]) -> Self:
        """The placement where rank ``r`` is on the machine that ``hosts[r]`` names."""
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            ranks.setdefault(host, []).append(rank)
        return cls(tuple(tuple(members) for members in ranks.values()))

    @property
    def world_size(self) -> int:
        """The number of replicas on all machines."""
        return sum(map(len, self.machines))

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each machine."""
        return tuple(members[0] for members in self.machines)

    @property
    def is_layered(self) -> bool:
        """Whether there are several machines, and one of them has several replicas."""
        return 1 < len(self.machines) < self.world_size

    def machine_of(self, rank: int) -> int:
        """The number of the machine that ``rank`` is on."""
        return next(number for number, members in enumerate(self.machines) if rank in members)

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks on the machine of ``rank``, itself included."""
        return self.machines[self.machine_of(rank)]


def calls(hosts: Sequence[str], *, group: bool, share: bool) -> set[tuple[int, int]]:
    """Which rank calls which other one in training, where rank ``r`` is on ``hosts[r]``.

    All call the first, which keeps the store. In a process group (``group``) each may call each;
    else each calls those after it, of a machine that can ``share`` memory only its leader.
    """
    ranks = range(len(hosts))
    if group:
        return {(a, b) for a in ranks for b in ranks if a != b}
    peers = Placement.of(hosts).leaders if share else tuple(ranks)
    return {(rank, 0) for rank in ranks if rank} | {(a, b) for a in peers for b in peers if a < b}


def note_sockets(cluster: ClusterSpec) -> None:
    """Have the chief say what it costs where tasks of this machine cannot share memory.

    Args:
        cluster: The tasks of the job.
    """
    if cluster.is_chief and cluster.local_size > 1 and not shares_memory():
        note(
            "%s: tasks exchange by sockets, which takes about ten times as long "
            "(docs/benchmarks.md, all-reduce on one machine)",
            why_not_shared(),
        )
