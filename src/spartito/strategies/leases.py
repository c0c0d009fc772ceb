"""A worker's batches under a parameter server: the pieces that the coordinator leases to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from spartito.data.batch import Batch
from spartito.data.collate import rows
from spartito.data.dataset import Dataset
from spartito.data.loader import IndexedFeed, Loader, make_feed, used_up
from spartito.data.passes import Passes
from spartito.data.prefetch import read_ahead
from spartito.data.source import PerWorker, Source
from spartito.errors import SpartitoError, UserError
from spartito.ps.chief import Chief
from spartito.ps.protocol.work import Complete, Lease, Pause, Report, WorkSource
from spartito.ps.scheduler.plan import Plan
from spartito.strategies.base import Distributed, Sums
from spartito.strategies.pusher import Place, Pusher

NO_EPOCH = -1  # is always complete: no work is given for it
TICK_SECONDS = 0.1  # between two looks of a chief that computes nothing


class Desk(Protocol):
    """What the batches need to know of the strategy that computes them."""

    device: torch.device
    chief: Chief | None
    work: WorkSource | None
    pusher: Pusher | None

    def plan(self, chain: Dataset, count: int, steps: int | None) -> Plan:
        """How a stream is divided into pieces."""
        ...

    def next_stream(self) -> int:
        """The number of a new stream, equal on all tasks."""
        ...

    def tell(self) -> None:
        """As the chief: have the servers know which options of the optimizer hold when."""
        ...

    def heed(self, timetable: bytes) -> None:
        """From now on show the options of the chief's timetable."""
        ...

    def enter(self, batch: Batch) -> None:
        """Announce the next batch."""
        ...


class Leased(Distributed):
    """Batches of the leases that this task gets; on a chief that computes nothing, ticks.

    A tick is a batch without rows, by which the loop comes round to see how far the others are.
    """

    goes_on = True

    def __init__(self, desk: Desk, chain: Dataset, slices: int, seed: int) -> None:
        if isinstance(chain.source, PerWorker):
            raise UserError(
                "per_worker data under parameter_server, where any task may get any piece",
                "Use a data set that every task can read, or a synchronous strategy.",
            )
        given = used_up(chain)
        if given is not None:
            raise UserError(
                f"a {type(given).__name__} under parameter_server, where any part of the data "
                "may be read again",
                "Give what can be iterated again: arrays, a list, a DataLoader, or an object "
                "with __iter__.",
            )
        Loader(chain, (0, slices), seed)  # refuses what cannot be divided
        self._desk, self._chain = desk, chain
        self._reader = (
            IndexedReader(chain, slices, seed)
            if isinstance(chain.source, Source)
            else StreamReader(chain, slices, seed)
        )
        self._start = (0, 0)
        self._stream: int | None = None
        self._epoch = 0
        self.waited = 0.0
        self._partial: list[float] = []  # of a lease that was left in the middle

    def __iter__(self) -> Iterator[Batch]:
        for batches in self.epochs(1, None, 0, list):
            for batch in batches:
                if batch.global_size:  # not a tick
                    yield batch
        self._look()

    def epochs(
        self, count: int, steps: int | None, done: int, sums: Sums
    ) -> Generator[Generator[Batch]]:
        desk, chief = self._desk, self._desk.chief
        stream = desk.next_stream()
        if chief is not None:
            desk.tell()  # before anybody pushes
            plan = desk.plan(self._chain, count, steps)
            chief.open(stream, replace(plan, start=self._start, first_epoch_done=done))
        self._stream = stream
        try:
            for epoch in range(count):
                self._epoch, self._partial = epoch, []
                yield self._run_epoch(stream, epoch, sums)
                if chief is not None:
                    chief.coordinator.close_epoch(stream, epoch)
        finally:
            if chief is not None:
                self._start = chief.coordinator.frontier(stream)
                chief.end_stream(stream)
            self._stream = None
            self._reader.close()

    def total(self, shared: Sequence[float], own: Sequence[float]) -> list[float]:
        mine = [*shared, *own]
        if self._desk.chief is None or self._stream is None:
            return mine
        parts = self._desk.chief.coordinator.sums(self._stream, self._epoch).sums, self._partial
        return [sum(column) for column in zip([0.0] * len(mine), *filter(None, parts), strict=True)]

    def order(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        number, step = self._where()
        return {"pass": number, "step": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = state["pass"], state["step"]

    def _where(self) -> tuple[int, int]:
        """The first global batch that is not done, as far as the chief knows."""
        if self._desk.chief is None or self._stream is None:
            return self._start
        place = self._desk.pusher.place if self._desk.pusher else None
        if place is not None and place.lease.group:  # all are at the same step
            return place.lease.pass_, place.step + 1
        return self._desk.chief.coordinator.frontier(self._stream)

    def _run_epoch(self, stream: int, epoch: int, sums: Sums) -> Generator[Batch]:
        chief = self._desk.chief
        while True:
            if self._desk.work is None:
                yield from self._ticks(stream, epoch)
            else:
                yield from self._leases(self._desk.work, self._pusher, stream, epoch, sums)
            if chief is None:
                return
            chief.flush()
            self._look()
            if chief.is_settled(stream, epoch):  # no server lost its last updates meanwhile
                return

    @property
    def _pusher(self) -> Pusher:
        if self._desk.pusher is None:
            raise UserError("batches of a job that was left", "Train before strategy.close().")
        return self._desk.pusher

    def _look(self) -> None:
        """The newest values into the model."""
        self._pusher.look()

    def _ticks(self, stream: int, epoch: int) -> Generator[Batch]:
        assert self._desk.chief is not None  # it is the chief that does not compute
        tick = Batch((), 0, 0, torch.empty(0, dtype=torch.int64), epoch, 0)
        while True:
            began = time.perf_counter()
            ended = self._desk.chief.coordinator.poll(stream, epoch, TICK_SECONDS)
            self.waited += time.perf_counter() - began
            if ended:
                return
            yield tick

    def _leases(
        self, work: WorkSource, pusher: Pusher, stream: int, epoch: int, sums: Sums
    ) -> Generator[Batch]:
        desk = self._desk
        report: Report | None = None
        before = sums()
        while True:
            began = time.perf_counter()
            answer = work.take(stream, epoch, report, wait=False)
            if isinstance(answer, Pause):
                pusher.servers.release()
                answer = work.take(stream, epoch, None)
            pusher.servers.waited += time.perf_counter() - began
            self.waited += time.perf_counter() - began
            desk.heed(work.timetable)
            if isinstance(answer, Complete):
                pusher.servers.release()  # who has not done its own yet need not wait for us
                return
            if isinstance(answer, Lease):
                place = pusher.place = Place(stream, answer)
                try:
                    ended = yield from self._pieces(place)
                    pusher.settle()
                except BaseException as why:  # left in the middle: others do the rest
                    try:
                        if isinstance(why, GeneratorExit):
                            pusher.leave()
                    finally:
                        self._partial = _since(sums(), before)
                        given_up = Report(answer.id, [], abandoned=True)
                        with suppress(SpartitoError):  # the first cause is what is told
                            work.take(stream, NO_EPOCH, given_up, wait=False)
                    raise
                finally:
                    pusher.place = None
                now = sums()
                report = Report(
                    answer.id, _since(now, before), ended, place.bad, place.detail, place.abandoned
                )
                before = now

    def _pieces(self, place: Place) -> Generator[Batch, None, int | None]:
        """The batches of a lease; answers where its pass ended, if that was found."""
        lease, expected = place.lease, place.lease.start
        batches = self._reader.read(lease)
        try:
            for batch in batches:
                place.step = expected
                expected += 1
                batch = self._placed(batch)
                began = time.perf_counter()
                self._pusher.ready(batch)
                self.waited += time.perf_counter() - began
                self._desk.enter(batch)
                yield batch
                if place.abandoned:
                    return None
        finally:
            batches.close()
        return None if expected == lease.stop else expected

    def _placed(self, batch: Batch) -> Batch:
        device = self._desk.device
        if device.type == "cpu":
            return batch
        move: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(device, non_blocking=True)  # noqa: E731
        return replace(batch, data=rows(batch.data, move))


def _since(now: Sequence[float], before: Sequence[float]) -> list[float]:
    return [new - old for new, old in zip(now, before, strict=True)]


class Reader(Protocol):
    """Reads the batches of a lease."""

    def read(self, lease: Lease) -> Generator[Batch]:
        """The local batches of the lease, fewer where the data ends before."""
        ...

    def close(self) -> None:
        """End what reads ahead; the next `read` begins anew."""
        ...


class IndexedReader:
    """Examples by index: any piece can be read at any time.

    A lease mostly goes on where the last one ended: what was read ahead then is there already.
    """

    def __init__(self, chain: Dataset, slices: int, seed: int) -> None:
        self._chain, self._slices, self._seed = chain, slices, seed
        self._passes = Passes(chain, seed if chain.seed is None else chain.seed)
        self._feeds: dict[int, IndexedFeed] = {}
        self._next = (0, 0, 0)  # slice, pass and step of the next of these batches
        self._batches: Generator[Batch] | None = None

    def read(self, lease: Lease) -> Generator[Batch]:
        """As `Reader.read`."""
        start = lease.slice, lease.pass_, lease.start
        if self._batches is None or self._next != start:
            self.close()
            self._batches = self._open(*start)
        for step in range(lease.start, lease.stop):
            batch = next(self._batches, None)
            if batch is None:
                return
            self._next = lease.slice, lease.pass_, step + 1
            yield batch

    def close(self) -> None:
        """As `Reader.close`."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _open(self, index: int, number: int, start: int) -> Generator[Batch]:
        chain = self._chain
        if index not in self._feeds:
            made = IndexedFeed(chain, (index, self._slices), self._seed, self._passes)
            self._feeds[index] = made
        tasks = self._feeds[index].tasks(number, start)
        return read_ahead(tasks, chain.ahead, chain.threads)


class StreamReader:
    """A stream is read in its order; only a lease from before its place makes it start anew."""

    def __init__(self, chain: Dataset, slices: int, seed: int) -> None:
        self._chain, self._slices, self._seed = chain, slices, seed
        self._at: dict[int, tuple[int, int, Iterator[Callable[[], Batch]]]] = {}

    def close(self) -> None:
        """As `Reader.close`: nothing reads ahead here."""

    def read(self, lease: Lease) -> Generator[Batch]:
        """As `Reader.read`."""
        number, step, tasks = self._at.pop(lease.slice, (-1, 0, iter(())))
        if number != lease.pass_ or step > lease.start:
            feed = make_feed(self._chain, (lease.slice, self._slices), self._seed)
            tasks, step = feed.tasks(lease.pass_, lease.start), lease.start
        for _ in range(lease.start - step):
            next(tasks, None)
        for done in range(lease.start, lease.stop):
            task = next(tasks, None)
            if task is None:
                return
            self._at[lease.slice] = lease.pass_, done + 1, tasks
            yield task()
