"""Who may go on as the next generation of a job, when tasks of the last one are lost: pure rules.

A generation is a set of processes that train together. Two sides that cannot reach each other must
never both go on, or there would be two results. So a side needs all of the last generation except
those that are certainly dead, or more than half of it; of two equal halves the one with the lowest
rank goes on. Any two such sides have a living process in common.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import ClusterSpec
from spartito.life import Life


class Card(msgspec.Struct, frozen=True):
    """A process that is a task of the job.

    ``rank`` and ``local_rank`` are those of the job's beginning; ``token`` differs for each process
    that comes as this task.
    """

    name: str
    rank: int
    local_rank: int
    token: str
    life: Life

    @property
    def node(self) -> int:
        """The same number for all tasks of its machine."""
        return self.rank - self.local_rank


class Vote(msgspec.Struct, frozen=True):
    """A member of the last generation wants a new one; ``dead`` are ranks that it knows to be."""

    card: Card
    dead: tuple[int, ...]
    lost: bool
    """Whether it lost somebody; else it lets those who wait come in."""


class Generation(msgspec.Struct, frozen=True):
    """The processes that train together, by their rank."""

    number: int
    members: tuple[Card, ...]

    def has(self, card: Card) -> bool:
        """Whether this process is of it."""
        return card in self.members


@dataclass(frozen=True, slots=True)
class Seen:
    """What one of those who form a generation knows of the others."""

    last: Generation
    votes: Mapping[int, Vote]
    comes: Mapping[int, Card]
    dead: frozenset[int]

    @property
    def ranks(self) -> frozenset[int]:
        """Those of the last generation."""
        return frozenset(card.rank for card in self.last.members)

    @property
    def side(self) -> frozenset[int]:
        """The members of the last generation that are here, and did not die since."""
        own = {card.rank: card for card in self.last.members}
        return frozenset(
            rank
            for rank, vote in self.votes.items()
            if own.get(rank) == vote.card and rank not in self.dead
        )

    @property
    def all_dead(self) -> frozenset[int]:
        """Members that somebody knows to be dead, and that are not here."""
        said = {rank for rank in self.side for rank in self.votes[rank].dead}
        return (self.dead | said) - self.side

    @property
    def people(self) -> tuple[Card, ...]:
        """All who are here, by rank; a newcomer stands for who is not."""
        side = self.side
        here = dict(self.comes)
        here |= {rank: self.votes[rank].card for rank in side}
        return tuple(here[rank] for rank in sorted(here))


def may_go_on(last: Collection[int], side: Collection[int], dead: Collection[int]) -> bool:
    """Whether ``side`` may form the next generation.

    Args:
        last: The ranks of the last generation.
        side: Those who would go on.
        dead: Those that have certainly ended.

    Returns:
        True for at most one of any two sides without a common member.
    """
    ours = set(side) & set(last)
    if set(last) - set(dead) <= ours:
        return True
    twice = 2 * len(ours)
    return twice > len(last) or (twice == len(last) and min(last) in ours)


def next_generation(seen: Seen, size: int, recovery: Recovery, waited: float) -> Generation | None:
    """The generation to form now; None while somebody is to be waited for.

    Args:
        seen: Who is here.
        size: How many tasks the job has.
        recovery: With how many it may go on, and after which wait.
        waited: Seconds since anybody came.
    """
    if not may_go_on(seen.ranks, seen.side, seen.all_dead):
        return None
    people = seen.people
    made = Generation(seen.last.number + 1, people)
    if len(people) == size:
        return made
    if seen.side == seen.ranks and not any(vote.lost for vote in seen.votes.values()):
        return made  # nobody was lost: it lets those who came in
    least = recovery.min_workers
    is_enough = least is not None and len(people) >= least and bool(seen.side)
    return made if is_enough and waited >= recovery.patience else None


def cluster_of(job: ClusterSpec, generation: Generation, own: Card) -> ClusterSpec:
    """The cluster as the members of a generation see it: ranks anew, in order, names as before."""
    members: Sequence[Card] = generation.members
    there = {card.rank for card in members}
    tasks = job.replica_tasks
    neighbours = [card.rank for card in members if card.node == own.node]
    return replace(
        job,
        absent=tuple(task for rank, task in enumerate(tasks) if rank not in there),
        rank=[card.rank for card in members].index(own.rank),
        world_size=len(members),
        local_rank=neighbours.index(own.rank),
        local_size=len(neighbours),
    )
