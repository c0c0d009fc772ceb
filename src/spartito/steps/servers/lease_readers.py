"""How the batches of a lease are read: by index, or from a stream."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Protocol

from spartito.data.batch import Batch
from spartito.data.dataset import Dataset
from spartito.data.reading.loader import IndexedFeed, make_feed
from spartito.data.reading.order import DataShard
from spartito.data.reading.passes import Passes
from spartito.data.reading.prefetch import read_ahead, read_ahead_in
from spartito.ps.protocol.work import Lease


class Reader(Protocol):
    """Reads the batches of a lease."""

    def read(self, lease: Lease) -> Generator[Batch]:
        """The local batches of the lease, fewer where the data ends before."""
        ...

    def close(self) -> None:
        """End what reads ahead; the next `read` begins anew."""
        ...


class IndexedReader:
    """Examples by index: any work item can be read at any time.

    All leases share the order of a pass, and threads that read ahead. These read what is leased;
    where one lease has followed another they go on beyond its end, as the next one mostly does.
    """

    def __init__(self, chain: Dataset, slices: int, seed: int, member: DataShard = (0, 1)) -> None:
        self._chain, self._slices, self._seed, self._member = chain, slices, seed, member
        self._passes = Passes(chain, seed if chain.seed is None else chain.seed)
        self._feeds: dict[int, IndexedFeed] = {}
        self._next = (-1, 0, 0)  # slice, pass and step after the last of these batches
        self._batches: Generator[Batch] | None = None
        self._goes_on = False  # beyond the end of a lease
        self._threads: ThreadPoolExecutor | None = None

    def read(self, lease: Lease) -> Generator[Batch]:
        """As `Reader.read`."""
        follows = self._next == (lease.data_shard, lease.pass_, lease.start)
        if self._batches is None or not (follows and self._goes_on):
            self._end()
            self._batches, self._goes_on = self._open(lease, follows), follows
        for step in range(lease.start, lease.stop):
            batch = next(self._batches, None)
            if batch is None:
                return
            self._next = lease.data_shard, lease.pass_, step + 1
            yield batch

    def close(self) -> None:
        """As `Reader.close`."""
        self._end()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _end(self) -> None:
        """Read ahead no more."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _open(self, lease: Lease, goes_on: bool) -> Generator[Batch]:
        chain, index = self._chain, lease.data_shard
        if index not in self._feeds:
            shard = index, self._slices
            made = IndexedFeed(chain, shard, self._seed, self._passes, self._member)
            self._feeds[index] = made
        tasks = self._feeds[index].tasks(lease.pass_, lease.start)
        if not goes_on:
            tasks = islice(tasks, lease.stop - lease.start)
        if not chain.ahead:
            return read_ahead(tasks, 0, 0)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(chain.threads, "spartito-data")
        return read_ahead_in(self._threads, tasks, chain.ahead)


class StreamReader:
    """A stream is read in its order; only a lease from before its position makes it start anew."""

    def __init__(self, chain: Dataset, slices: int, seed: int, member: DataShard = (0, 1)) -> None:
        self._chain, self._slices, self._seed, self._member = chain, slices, seed, member
        self._at: dict[int, tuple[int, int, Iterator[Callable[[], Batch]]]] = {}

    def close(self) -> None:
        """As `Reader.close`: nothing reads ahead here."""

    def read(self, lease: Lease) -> Generator[Batch]:
        """As `Reader.read`."""
        number, step, tasks = self._at.pop(lease.data_shard, (-1, 0, iter(())))
        if number != lease.pass_ or step > lease.start:
            shard = lease.data_shard, self._slices
            feed = make_feed(self._chain, shard, self._seed, self._member)
            tasks, step = feed.tasks(lease.pass_, lease.start), lease.start
        for _ in range(lease.start - step):
            next(tasks, None)
        for done in range(lease.start, lease.stop):
            task = next(tasks, None)
            if task is None:
                return
            self._at[lease.data_shard] = lease.pass_, done + 1, tasks
            yield task()
