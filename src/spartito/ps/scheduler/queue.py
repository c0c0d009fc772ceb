"""Who computes what: a queue that leases work items of global batches to workers.

A *work item* is (pass, step, slice). Pure: it starts no thread and reads no clock; times come as
arguments, in seconds. Each work item is finished exactly once, unless it is reopened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from math import fsum
from typing import Any, NamedTuple, Self

from spartito.errors import UserError
from spartito.ps.protocol.work import Lease
from spartito.ps.scheduler.plan import OPEN, BatchIndex
from spartito.ps.scheduler.plan import Plan as Plan
from spartito.ps.scheduler.progress import (
    Numbers,
    Outstanding,
    QueueState,
    RateEstimate,
    Settled,
    ShardProgress,
    settled,
)

END_FRACTION = 4
"""A lease is at most this part of what is left of the epoch for each worker."""


class WorkRange(NamedTuple):
    """Steps ``start`` to ``stop`` of one slice of pass ``pass_``."""

    pass_: int
    data_shard: int
    start: int
    stop: int


class WorkQueue:
    """The work of one stream: leases are taken, and then finished or dropped.

    Worker ``i`` gets slice ``i % data_shards``, and helps where most is left when that has nothing.
    """

    def __init__(self, plan: Plan, groups: Numbers | None = None) -> None:
        """``groups`` numbers the groups, of all queues of a job together."""
        self.plan = plan
        self._batches = BatchIndex(plan)
        self._shards = [ShardProgress() for _ in range(plan.data_shards)]
        self._held: dict[int, Outstanding] = {}
        self._rates: dict[int, RateEstimate] = {}
        self._live: set[int] = set()
        self._waiting: set[int] = set()
        self._granted: dict[int, Lease] = {}
        self._sums: defaultdict[int, list[Sequence[float]]] = defaultdict(list)
        self._metrics: defaultdict[int, list[bytes]] = defaultdict(list)
        self._closed = 0
        self._ids, self._groups = Numbers(), Numbers() if groups is None else groups

    def dump(self) -> QueueState:
        """All of it; the queue goes on, and what is returned may change with it."""
        return QueueState(
            plan=self.plan,
            passes=self._batches.passes,
            shards=self._shards,
            held=list(self._held.values()),
            rates=self._rates,
            live=self._live,
            waiting=self._waiting,
            granted=self._granted,
            sums=self._sums,
            metrics=self._metrics,
            closed=self._closed,
            ids=self._ids.upcoming,
        )

    @classmethod
    def load(cls, state: QueueState, groups: Numbers, *more: Any) -> Self:
        """The queue that `dump` described; ``groups`` as in a new one."""
        made = cls(state.plan, groups, *more)
        made._batches.passes[:] = state.passes
        made._shards = state.shards
        made._held = {held.lease.id: held for held in state.held}
        made._rates, made._granted = dict(state.rates), dict(state.granted)
        made._live, made._waiting = state.live, state.waiting
        made._sums.update(state.sums)
        made._metrics.update(state.metrics)
        made._closed, made._ids = state.closed, Numbers(state.ids)
        return made

    # Who works

    def join(self, worker: int) -> None:
        """``worker`` is there: groups are granted when it asks too. Taking joins as well."""
        self._live.add(worker)

    def drop(self, worker: int) -> list[Lease]:
        """``worker`` is gone: its leases go back; returns them."""
        self._live.discard(worker)
        self._waiting.discard(worker)
        self._granted.pop(worker, None)
        dropped = [held.lease for held in self._held.values() if held.worker == worker]
        for lease in dropped:
            self.abandon(lease.id)
        return dropped

    def expired(self, now: float, limit: float) -> list[tuple[int, Lease]]:
        """(worker, lease) of the leases that are out for more than ``limit`` seconds."""
        return [(h.worker, h.lease) for h in self._held.values() if now - h.since > limit]

    def held(self) -> list[tuple[int, Lease]]:
        """(worker, lease) of all leases that are out."""
        return [(held.worker, held.lease) for held in self._held.values()]

    # What they do

    def take(self, worker: int, epoch: int, now: float) -> Lease | None:
        """Work for ``worker``, who is in ``epoch``; None: nothing at present, or all is done.

        Reopened work items come first. Without gates there is work of the next epoch when this one
        has none to give and is not complete.
        """
        if self.is_complete(epoch):
            return None
        self.join(worker)
        if self.plan.together:
            return self._take_together(worker, epoch, now)
        for limit, lost in ((OPEN, True), *((limit, False) for limit in self._limits(epoch))):
            found = self._choose(worker, limit, lost)
            if found is not None:
                start, stop = self._range(found, limit, lost)
                length = self._length(worker, limit)
                return self._lease(worker, found, start, min(stop, start + length), lost, now)
        return None

    def unheard(self, worker: int) -> Lease | None:
        """A lease of ``worker``, who asks for one: it never heard of it."""
        if worker in self._granted:
            return None
        return next((held.lease for held in self._held.values() if held.worker == worker), None)

    def granted(self, worker: int) -> Lease | None:
        """The lease that was granted to ``worker`` when others took theirs, once."""
        lease = self._granted.pop(worker, None)
        if lease is not None:
            self._waiting.discard(worker)
        return lease

    def finish(
        self, lease: int, sums: Sequence[float], ended: int | None, now: float, metrics: bytes = b""
    ) -> bool:
        """The work items of a lease are applied; ``sums`` and ``metrics`` count for its epoch.

        ``ended`` is the number of steps of its pass, where the worker found the end: no slice
        has more. False where the lease was dropped: its work items are, or will be, another's.
        """
        held = self._held.pop(lease, None)
        if held is None:
            return False
        if ended is not None:
            self._end(held, ended)
        found, given = self._shards[held.lease.data_shard], held.lease
        found.done.add(held.start, held.stop)
        for start, stop in held.redo:
            self._lose(found, start, min(stop, held.stop))
        if given.counts:
            self._sums[given.epoch].append(sums)
            if metrics:
                self._metrics[given.epoch].append(metrics)
        if held.stop > held.start:
            self._rate(held.worker).measure(held.stop - held.start, now - held.since)
        return True

    def abandon(self, lease: int) -> bool:
        """A lease is not finished: all its work items go back. False if it was dropped before."""
        held = self._held.pop(lease, None)
        if held is None:
            return False
        found = self._shards[held.lease.data_shard]
        (found.back if held.lease.counts else found.lost).add(held.start, held.stop)
        return True

    def reopen(self, lost: Iterable[WorkRange]) -> int:
        """Work whose updates were lost is to be done again; returns how many work items that are.

        Their sums were counted and count no more. Those of a lease that is out come after it;
        those that nobody has begun are left alone, as they will be computed anyway.
        """
        reopened = 0
        for number, index, first, last in lost:
            begin, found = self._batches.find(number, first), self._shards[index]
            if begin is None:
                continue
            end = begin + last - first
            for start, stop in found.done.overlap(begin, end):
                self._lose(found, start, stop)
                reopened += stop - start
            for held in self._held.values():
                start, stop = max(held.start, begin), min(held.stop, end)
                if held.lease.data_shard == index and start < stop:
                    held.redo.add(start, stop)
                    reopened += stop - start
        return reopened

    # How far they are

    def is_complete(self, epoch: int) -> bool:
        """Whether every work item up to the end of ``epoch`` is finished."""
        stop = self._batches.stop(epoch)
        return stop != OPEN and self._frontier() >= stop

    def close(self, epoch: int) -> None:
        """Let work of the next epoch begin."""
        self._closed = max(self._closed, epoch + 1)
        self._metrics.pop(epoch, None)

    def sums(self, epoch: int) -> list[float]:
        """The element-wise sum of what was reported for ``epoch``, in whatever order it came.

        Empty before the first report.
        """
        return list(map(fsum, zip_longest(*self._sums[epoch], fillvalue=0.0)))

    def metrics(self, epoch: int) -> list[bytes]:
        """The states of metrics that were reported for ``epoch``, in whatever order they came."""
        return list(self._metrics[epoch])

    def items_done(self, epoch: int) -> int:
        """How many work items of ``epoch`` are finished; a global batch has ``data_shards``."""
        start, stop = self._batches.stop(epoch - 1), self._batches.stop(epoch)
        return sum(found.done.within(start, stop) for found in self._shards)

    def steps(self, epoch: int) -> int | None:
        """How many global batches ``epoch`` has in this plan; None where nobody knows yet."""
        start, stop = self._batches.stop(epoch - 1), self._batches.stop(epoch)
        return None if stop == OPEN else stop - start

    def spare(self, epoch: int) -> int:
        """How many more leases there are to give to who is in ``epoch``."""
        limit, size = self._limits(epoch)[-1], self.plan.multiple
        return sum(-(-found.left(limit) // size) for found in self._shards)

    def frontier(self) -> tuple[int, int]:
        """(pass, step) of the first global batch with a work item that is not finished."""
        return self._batches.locate(self._frontier())

    def settled(self, epoch: int, met: tuple[int, int] | None = None) -> Settled:
        """From where ``epoch`` would be gone on with: nothing before that is done again.

        Where others have begun later epochs that is its last global batch. All workers may have
        ``met`` at a (pass, step), which counts if all before it is finished, or reported soon.
        """
        return settled(self.plan, self._batches, self._shards, self._held.values(), epoch, met)

    def begun(self) -> Iterator[WorkRange]:
        """All that is finished or out, each range of one pass."""
        for index, found in enumerate(self._shards):
            out = [(h.start, h.stop) for h in self._held.values() if h.lease.data_shard == index]
            for start, stop in (*found.done, *out):
                while start < stop:
                    here = self._batches.at(start)
                    end, offset = min(stop, here.stop), here.step - here.first
                    yield WorkRange(here.number, index, start + offset, end + offset)
                    start = end

    # Inside

    def _frontier(self) -> int:
        return min(found.done.frontier() for found in self._shards)

    def _limits(self, epoch: int) -> list[int]:
        """Up to where work may be given, the nearest limit first."""
        if self.plan.gated or self.plan.together:
            return [self._batches.stop(min(epoch, self._closed))]
        return [self._batches.stop(epoch), self._batches.stop(epoch + 1)]

    def _choose(self, worker: int, limit: int, lost: bool) -> int | None:
        """The slice to give from: the worker's own, else that with the most left."""
        own = worker % len(self._shards)
        able = [i for i, found in enumerate(self._shards) if found.next(limit, lost)]
        if own in able or not able:
            return own if able else None
        return max(able, key=lambda index: self._shards[index].left(limit))

    def _range(self, index: int, limit: int, lost: bool) -> tuple[int, int]:
        """The first range of a slice that is of one pass and of one epoch."""
        found = self._shards[index].next(limit, lost)
        if found is None:
            raise ValueError(f"slice {index} has nothing to give")
        start, stop = found
        end = self._batches.stop(self._batches.epoch(start))
        return start, min(stop, end, self._batches.at(start).stop)

    def _length(self, worker: int, limit: int) -> int:
        """How many work items to give: about a second's, and few where little is left."""
        length = self._target(worker)
        left = sum(found.left(limit) for found in self._shards)
        share = left // (END_FRACTION * len(self._live))
        return self._rounded(length if limit == OPEN else min(length, share))

    def _target(self, worker: int) -> int:
        return self.plan.multiple if self.plan.fixed_length else self._rate(worker).target

    def _rounded(self, length: int) -> int:
        multiple = self.plan.multiple
        return max(multiple, length // multiple * multiple)

    def _rate(self, worker: int) -> RateEstimate:
        return self._rates.setdefault(worker, RateEstimate(self.plan.multiple))

    def _lease(
        self,
        worker: int,
        index: int,
        start: int,
        stop: int,
        lost: bool,
        now: float,
        group: int = 0,
        sizes: tuple[int, ...] = (),
    ) -> Lease:
        number, step = self._batches.locate(start)
        lease = Lease(
            id=next(self._ids),
            epoch=self._batches.epoch(start),
            pass_=number,
            data_shard=index,
            start=step,
            stop=step + stop - start,
            group=group,
            sizes=sizes,
            counts=not lost,
        )
        self._shards[index].give(start, stop, lost)
        self._held[lease.id] = Outstanding(lease, worker, now, start, stop)
        return lease

    def _take_together(self, worker: int, epoch: int, now: float) -> Lease | None:
        self._waiting.add(worker)
        if worker not in self._granted and not self._held and self._waiting >= self._live:
            lost = any(found.lost for found in self._shards)
            self._grant(OPEN if lost else self._limits(epoch)[0], lost, now)
        return self.granted(worker)

    def _grant(self, limit: int, lost: bool, now: float) -> None:
        """Lease to all live workers at once: the same steps of the slices that are behind."""
        heads = {
            index: found[0]
            for index, one in enumerate(self._shards)
            if (found := one.next(limit, lost)) is not None
        }
        if not heads:
            return
        members, data_shards = sorted(self._live), len(self._shards)
        start = min(heads.values())
        behind = [index for index, head in heads.items() if head == start]
        own = {member % data_shards for member in members}
        chosen = sorted(behind, key=lambda index: (index not in own, index))[: len(members)]
        # A slice without a worker of its own is caught up by several, up to where the rest is.
        share = len(members) // len(chosen)
        length = self._rounded(min(map(self._target, members)))
        others = [head for head in heads.values() if head > start]
        stop = min(
            start + share * length,
            *others,
            *(self._range(index, limit, lost)[1] for index in chosen),
        )
        part = self._rounded(-(-(stop - start) // share) + self.plan.multiple - 1)
        starts = range(start, stop, part)
        parts = [(index, first) for index in chosen for first in starts]
        sizes = tuple(min(first + part, stop) - first for _, first in parts)
        group = next(self._groups)
        for (index, first), size, member in zip(
            parts, sizes, self._seated(parts, members), strict=True
        ):
            self._granted[member] = self._lease(
                member, index, first, first + size, lost, now, group, sizes
            )

    def _seated(self, parts: list[tuple[int, int]], members: list[int]) -> list[int]:
        """A member for each part: who owns the slice if possible, else whoever is free."""
        seats: dict[int, int] = {}
        for seat, (index, _) in enumerate(parts):
            for member in members:
                if member % len(self._shards) == index and member not in seats.values():
                    seats[seat] = member
                    break
        free = iter([member for member in members if member not in seats.values()])
        return [seats[s] if s in seats else next(free) for s in range(len(parts))]

    def _end(self, held: Outstanding, step: int) -> None:
        """A pass turned out to have ``step`` steps: nobody has or gets work beyond."""
        if step == 0:
            raise UserError("the data set has no examples")
        reached = max(found.done.end() for found in self._shards)
        stop = self._batches.end(held.lease.pass_, step, reached)
        if stop is None:
            return
        for found in self._shards:
            found.cursor = min(found.cursor, stop)
            found.back.remove(stop, OPEN)
        for other in (held, *self._held.values()):
            other.start, other.stop = min(other.start, stop), min(other.stop, stop)

    def _lose(self, found: ShardProgress, start: int, stop: int) -> None:
        if start < stop:
            found.done.remove(start, stop)
            found.lost.add(start, stop)
