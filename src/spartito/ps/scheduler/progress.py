"""How far one slice of the batches is, and how fast one worker is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from spartito.ps.protocol.work import Lease
from spartito.ps.scheduler.plan import BatchIndex, Pass, Plan
from spartito.ps.scheduler.ranges import Ranges

LEASE_SECONDS = 1.0
"""How long a lease should take: what is lost when its worker dies."""


@dataclass(slots=True)
class ShardProgress:
    """Where one slice is, in numbers of global batches."""

    cursor: int = 0  # nothing from here on was ever given out
    back: Ranges = field(default_factory=Ranges)  # given out, and come back unfinished
    lost: Ranges = field(default_factory=Ranges)  # reported, and to be computed again
    done: Ranges = field(default_factory=Ranges)

    def next(self, limit: int, lost: bool) -> tuple[int, int] | None:
        """The first range below ``limit`` that can be given out."""
        if lost:
            return next(iter(self.lost), None)
        start, stop = next(iter(self.back), (self.cursor, limit))
        return (start, min(stop, limit)) if start < limit else None

    def left(self, limit: int) -> int:
        """How many work items below ``limit`` can be given out."""
        return self.back.within(0, limit) + max(0, limit - self.cursor)

    def give(self, start: int, stop: int, lost: bool) -> None:
        """Take a range out of what can be given."""
        (self.lost if lost else self.back).remove(start, stop)
        self.cursor = max(self.cursor, stop)


@dataclass(slots=True)
class RateEstimate:
    """How many work items a worker may have at a time, from how fast it was."""

    target: int
    rate: float = 0.0

    def measure(self, work_items: int, seconds: float) -> None:
        """Learn from a lease: about `LEASE_SECONDS` of work, at most twice the last length."""
        rate = work_items / max(seconds, 1e-9)
        self.rate = (self.rate + rate) / 2 if self.rate else rate
        self.target = max(1, int(min(self.rate * LEASE_SECONDS, 2 * self.target)))


@dataclass(slots=True)
class Numbers(Iterator[int]):
    """Whole numbers in a row, each once; ``upcoming`` is the next."""

    upcoming: int = 1

    def __next__(self) -> int:
        self.upcoming += 1
        return self.upcoming - 1


@dataclass(slots=True)
class Outstanding:
    """A lease that is out, with its range in numbers of global batches."""

    lease: Lease
    worker: int
    since: float
    start: int
    stop: int
    redo: Ranges = field(default_factory=Ranges)  # to be computed again once it is finished


class QueueState(msgspec.Struct):
    """A `WorkQueue` as plain values."""

    plan: Plan
    passes: list[Pass]
    shards: list[ShardProgress]
    held: list[Outstanding]
    rates: Mapping[int, RateEstimate]
    live: set[int]
    waiting: set[int]
    granted: Mapping[int, Lease]
    sums: Mapping[int, list[Sequence[float]]]
    metrics: Mapping[int, list[bytes]]
    closed: int
    ids: int


class Settled(NamedTuple):
    """The position (pass, step), how many batches of its epoch and global steps come before it."""

    pass_: int
    step: int
    done: int
    updates: int


def settled(
    plan: Plan,
    batches: BatchIndex,
    shards: Sequence[ShardProgress],
    held: Collection[Outstanding],
    epoch: int,
    met: tuple[int, int] | None,
) -> Settled:
    """As `WorkQueue.settled`; ``shards`` are its slices, ``held`` the leases that are out."""
    begin, end = batches.stop(epoch - 1), batches.stop(epoch)
    batch = min(found.done.frontier() for found in shards)
    there = None if met is None else batches.past(*met)
    if met is not None and there is not None and _is_done(shards, held, there):
        done = there - begin + (0 if epoch else plan.first_epoch_done)
        # In the epoch that ends there: a later pass may be of the next one.
        where = met if done > 0 else batches.locate(there)
        return Settled(*where, done, batches.updates(there))
    if epoch < plan.epochs and batch >= end:
        batch = max(begin, end - 1)
    done = batch - begin + (0 if epoch else plan.first_epoch_done)
    return Settled(*batches.locate(batch), done, batches.updates(batch))


def level(state: QueueState, lease: int) -> list[Outstanding] | None:
    """What is out of the leases that were granted with ``lease``, but itself.

    None where not all slices are in the middle of these, or at their end.
    """
    own = next((held for held in state.held if held.lease.id == lease), None)
    if own is None or not own.lease.counts:
        return None
    granted = [held for held in state.held if held.lease.group == own.lease.group]
    if any(held.redo or (held.start, held.stop) != (own.start, own.stop) for held in granted):
        return None
    out = {held.lease.data_shard for held in granted}
    for index, found in enumerate(state.shards):
        if found.done.frontier() < (own.start if index in out else own.stop):
            return None
    return [held for held in granted if held is not own]


def _is_done(shards: Sequence[ShardProgress], held: Collection[Outstanding], batch: int) -> bool:
    """Whether all before ``batch`` is finished, or in a lease that ends there."""
    for index, found in enumerate(shards):
        ends = [(o.start, o.stop) for o in held if o.lease.data_shard == index and o.stop <= batch]
        done = Ranges()
        for span in (*found.done, *ends):
            done.add(*span)
        if done.frontier() < batch:
            return False
    return True
