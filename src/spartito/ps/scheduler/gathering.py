"""Which groups are merged together, and when: decided once, for all servers.

Pure: it starts no thread and reads no clock; times come as arguments, in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from spartito.ps.protocol.work import REJECTED, Arrival, Merge
from spartito.ps.scheduler.progress import Numbers


@dataclass(slots=True)
class Begun:
    """How many merges, and meetings of a quorum, there were when a group began."""

    merges: int = 0
    meetings: int = 0


@dataclass(slots=True)
class Here:
    """A group that has come to be merged, and since when it waits."""

    arrival: Arrival
    since: float


@dataclass(slots=True)
class Done:
    """What was merged of one group."""

    merges: int = 0
    alone: int = 0
    rejected: int = 0
    staleness: int = 0
    nbytes: int = 0
    loss: float = 0.0
    counts: float = 0.0


@dataclass(slots=True)
class Gathering:
    """Groups that have come, until it is decided with whom each of them is merged.

    A meeting closes when all have come that can, or ``grace`` seconds after ``quorum`` groups
    have. Who began before the last meeting closed is late: it is merged when it comes, alone.
    Alone a group counts by a fraction, its weight over that of all that are there, so that
    several late ones do not move the servers further than all would together: weights of an update,
    as the last stretch of an epoch is shorter than that of others before. What is more
    than ``bound`` merges old (None: no bound) is rejected.
    """

    quorum: int
    grace: float
    bound: int | None
    numbers: Numbers
    merges: int = 0
    meetings: int = 0
    done: dict[int, Done] = field(default_factory=dict)
    """Of each group, since `take`."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many differences were so many merges old."""
    _begun: dict[int, Begun] = field(default_factory=dict)
    _here: dict[int, Here] = field(default_factory=dict)
    _weights: dict[int, float] = field(default_factory=dict)

    def begin(self, group: int) -> None:
        """``group`` trains on from the newest values."""
        self._begun[group] = Begun(self.merges, self.meetings)
        self._here.pop(group, None)

    def arrive(self, group: int, arrival: Arrival, now: float) -> None:
        """``group`` has come."""
        self._weights[group] = arrival.weight / max(1, arrival.updates)
        self._here.setdefault(group, Here(arrival, now))

    def leave(self, group: int) -> None:
        """``group`` is lost."""
        self._here.pop(group, None)
        self._weights.pop(group, None)

    def waits(self, group: int) -> bool:
        """Whether ``group`` has come, and nothing is decided yet."""
        return group in self._here

    def decide(
        self, now: float, away: Collection[int], free: int, live: Collection[int]
    ) -> Iterator[dict[int, tuple[Arrival, Merge]]]:
        """Whoever is merged together now, or rejected: what came of each, and what becomes of it.

        ``away`` compute, ``free`` more groups could begin to, and ``live`` are all that are there.
        """
        for group in [*self._here]:
            stale = self.merges - self._since(group).merges
            if self.bound is not None and stale > self.bound:
                yield self._rejected(group)
            elif self._is_late(group):
                yield self._merged([group], live, meets=False)
        present = sorted(self._here)
        others = free + sum(not self._is_late(group) for group in away)
        need = min(self.quorum, len(present) + others)
        if present and len(present) >= need:
            quorate = sorted(self._here[group].since for group in present)[max(need, 1) - 1]
            if not others or now - quorate >= self.grace:
                yield self._merged(present, live, meets=True)

    def take(self) -> dict[int, Done]:
        """What was done since the last call."""
        found, self.done = self.done, {}
        return found

    def _since(self, group: int) -> Begun:
        return self._begun.setdefault(group, Begun(self.merges, self.meetings))

    def _is_late(self, group: int) -> bool:
        return self._since(group).meetings < self.meetings

    def _rejected(self, group: int) -> dict[int, tuple[Arrival, Merge]]:
        self.done.setdefault(group, Done()).rejected += 1
        return {group: (self._here.pop(group).arrival, REJECTED)}

    def _merged(
        self, groups: Sequence[int], live: Collection[int], meets: bool
    ) -> dict[int, tuple[Arrival, Merge]]:
        number, found = next(self.numbers), {}
        share = self._share(groups[0], live) if len(groups) == 1 else 1.0
        for group in groups:
            arrival = self._here.pop(group).arrival
            stale = self.merges - self._since(group).merges
            found[group] = arrival, Merge(number, len(groups), share, stale)
            self.staleness[stale] += 1
            done = self.done.setdefault(group, Done())
            done.merges += 1
            done.alone += len(groups) == 1
            done.staleness += stale
            done.nbytes += arrival.nbytes
            done.loss += arrival.loss
            done.counts += arrival.counts
        self.merges += 1
        self.meetings += meets
        return found

    def _share(self, group: int, live: Collection[int]) -> float:
        own = self._weights[group]
        total = own + sum(self._weights.get(other, own) for other in live if other != group)
        return own / total if total else 1.0
