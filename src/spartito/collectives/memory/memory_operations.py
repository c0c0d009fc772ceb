"""The collective operations of ranks that share memory, on rows of bytes.

Large rows go through the slots in chunks, so that what is written, added up and read again stays
in the caches, and all ranks work at the same time. Each meeting of the ranks costs more than some
memory traffic where other processes have the cores too: a rank that waits for one that lost its
core loses its own. So two ranks add up everything twice, and write ahead what the other may read
later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from spartito.collectives.arithmetic import Arithmetic
from spartito.collectives.memory.rank_memory import HUGE, LARGE, Bytes, Memory

WHOLE = 256 << 10  # bytes up to which each rank adds up everything: one meeting instead of two
CHUNK = LARGE // 2  # bytes of a row that are reduced in one step
PART = 256 << 10  # bytes that are written before others are told
ALIGNED = 64  # bytes: what parts of a slot are rounded to


class SharedMemoryOperations:
    """The operations of a group on one machine; each begins with `Memory.begin`.

    Args:
        memory: What its ranks share.
        most: Bytes of the largest slots, which a sum of two ranks takes.
    """

    def __init__(self, memory: Memory, most: int = HUGE) -> None:
        self.memory, self._most = memory, most
        self.rank, self.size = memory.rank, memory.size

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.memory.meet()

    def all_reduce(self, row: Bytes, way: Arithmetic) -> None:
        """Replace ``row`` by the reduction of all ranks' rows; in rank order, the same on all."""
        if len(row) > WHOLE and self.size > 2:
            self._reduce_by_slices(row, way, range(self.size))
            return
        memory = self.memory
        if len(row) <= WHOLE:
            slots = memory.open(memory.slots(len(row)))
            slots[self.rank][: len(row)] = row
            memory.announce()
            memory.wait()
            self._add_parts(slots, row, way)
            return
        kind = memory.slots(len(row), self._most)
        count = -(-len(row) // kind.size)
        for first, last in slices(len(row), count, ALIGNED):
            self._all_reduce_ahead(row[first:last], memory.open(kind), way)

    def _all_reduce_ahead(self, row: Bytes, slots: Sequence[Bytes], way: Arithmetic) -> None:
        """Add up part after part; while others are late, write those that come next."""
        memory, own, written = self.memory, slots[self.rank], 0
        starts = _starts(len(row), PART)
        for part, start in enumerate(starts, 1):
            while written < len(starts) and (written < part or not memory.has_part(part)):
                chunk = row[written * PART : (written + 1) * PART]
                own[written * PART :][: len(chunk)] = chunk
                written += 1
                memory.announce_part(written)
            memory.wait_for_part(part)
            self._add_parts([slot[start:] for slot in slots], row[start : start + PART], way)

    def _add_parts(self, slots: Sequence[Bytes], row: Bytes, way: Arithmetic) -> None:
        """Add up what is in the slots of all; what is added first may be replaced by the sum."""
        parts = [slot[: len(row)] for slot in slots]
        if self.rank < 2:
            parts[self.rank] = row
        add_up(parts, row, way)

    def reduce(self, row: Bytes, root: int, way: Arithmetic) -> None:
        """As `all_reduce`; only rank ``root`` gets the result."""
        if len(row) > WHOLE:
            self._reduce_by_slices(row, way, [root])
            return
        memory = self.memory
        slots = memory.open(memory.slots(len(row)))
        if self.rank == root:
            memory.announce()
            memory.wait()
            parts = [slot[: len(row)] for slot in slots]
            parts[root] = row
            add_up(parts, row, way)
        else:
            slots[self.rank][: len(row)] = row
            memory.announce()

    def broadcast(self, row: Bytes, root: int) -> None:
        """Give all ranks the row of rank ``root``."""
        memory = self.memory
        kind = memory.slots(len(row))
        step = min(kind.size, CHUNK)
        for start in _starts(len(row), step):
            part = row[start : start + step]
            slots = memory.open(kind)
            if self.rank == root:
                slots[root][: len(part)] = part
                memory.announce()
            else:
                memory.announce()
                memory.wait([root])
                part[:] = slots[root][: len(part)]

    def all_gather(self, row: Bytes, into: Sequence[Bytes]) -> None:
        """Put the row of each rank into its entry of ``into``."""
        memory = self.memory
        kind = memory.slots(len(row))
        step = min(kind.size, CHUNK)
        if len(row):
            copy(into[self.rank], row)
        for start in _starts(len(row), step):
            part = row[start : start + step]
            slots = memory.open(kind)
            slots[self.rank][: len(part)] = part
            memory.announce()
            for peer in self._others():
                memory.wait([peer])
                into[peer][start : start + step] = slots[peer][: len(part)]

    def reduce_scatter(self, rows: Sequence[Bytes], into: Bytes, way: Arithmetic) -> None:
        """Reduce the ``rows``, one for each rank: ``into`` becomes the result of our own."""
        memory, size = self.memory, len(into)
        kind = memory.slots(size * self.size)
        step = _part(kind.size, self.size)
        for start in _starts(size, step):
            slots = memory.open(kind)
            own = slots[self.rank]
            for peer in self._others():
                part = rows[peer][start : start + step]
                own[peer * step :][: len(part)] = part
            memory.announce()
            memory.wait()
            target = into[start : start + step]
            parts = [slot[self.rank * step :][: len(target)] for slot in slots]
            parts[self.rank] = rows[self.rank][start : start + step]
            add_up(parts, target, way)

    def exchange(self, out: Sequence[Bytes], into: Sequence[Bytes], largest: int) -> None:
        """Send row ``out[r]`` to each rank ``r``, and put what it sends into ``into[r]``.

        ``largest`` is the size of the largest row of any two ranks, which all ranks know. Rows of
        0 bytes are not waited for.
        """
        memory, rank = self.memory, self.rank
        kind = memory.slots(largest * self.size)
        step = _part(kind.size, self.size)
        if len(out[rank]):
            copy(into[rank], out[rank])
        for start in _starts(largest, step):
            slots = memory.open(kind)
            own = slots[rank]
            for peer in self._others():
                part = out[peer][start : start + step]
                own[peer * step :][: len(part)] = part
            memory.announce()
            for peer in self._others():
                part = into[peer][start : start + step]
                if len(part):
                    memory.wait([peer])
                    part[:] = slots[peer][rank * step :][: len(part)]

    def limit_to(self, seconds: float) -> None:
        """Let each wait for another rank take no longer than ``seconds`` from now on."""
        self.memory.timeout = seconds

    def leave(self, error: BaseException) -> None:
        """Make no more calls: who waits for this rank raises ``error``."""
        self.memory.leave(error)

    def close(self) -> None:
        """Leave the group."""
        self.memory.close()

    def _others(self) -> Iterator[int]:
        """The other ranks, of which each begins with another."""
        for distance in range(1, self.size):
            yield (self.rank + distance) % self.size

    def _reduce_by_slices(self, row: Bytes, way: Arithmetic, to: Sequence[int]) -> None:
        """Each rank adds up a slice of every chunk.

        In one step a chunk is written, the one before is added up, and the one before that read.
        """
        memory, rank, size = self.memory, self.rank, self.size
        kind = memory.slots(len(row))
        starts = list(_starts(len(row), CHUNK))
        reads = rank in to
        before: tuple[Bytes, list[Bytes]] | None = None
        for start in [*starts, None]:
            slots = memory.open(kind)
            own = slots[rank]
            chunk = row[:0]
            if start is not None:
                chunk = row[start : start + CHUNK]
                for peer, (first, last) in enumerate(slices(len(chunk), size, way.itemsize)):
                    if peer != rank:
                        own[first:last] = chunk[first:last]
            if before is not None:
                earlier, written = before
                first, last = slices(len(earlier), size, way.itemsize)[rank]
                parts = [slot[first:last] for slot in written]
                parts[rank] = earlier[first:last]
                result = own[CHUNK:][: last - first]
                add_up(parts, result, way)
                if reads:
                    earlier[first:last] = result
            memory.announce()
            memory.wait()
            if before is not None and reads:
                earlier = before[0]
                for peer, (first, last) in enumerate(slices(len(earlier), size, way.itemsize)):
                    if peer != rank:
                        earlier[first:last] = slots[peer][CHUNK:][: last - first]
            before = (chunk, slots)


def add_up(parts: Sequence[Bytes], into: Bytes, way: Arithmetic) -> None:
    """Reduce rows in their order; ``into`` may be one of them."""
    if not len(into):
        return
    first, second, *others = parts
    if any(np.may_share_memory(into, part) for part in others):
        into[:] = _sum_aside(parts, way)
        return
    way.join(first, second, into)
    for part in others:
        way.join(into, part, into)


def _sum_aside(parts: Sequence[Bytes], way: Arithmetic) -> Bytes:
    total = np.empty_like(parts[0])
    way.join(parts[0], parts[1], total)
    for part in parts[2:]:
        way.join(total, part, total)
    return total


def copy(into: Bytes, row: Bytes) -> None:
    """Copy ``row``, unless ``into`` is the same memory."""
    if into.ctypes.data != row.ctypes.data:
        into[:] = row


def _starts(size: int, step: int) -> range:
    """Where the chunks of a row begin; a row without bytes has one, so that calls are compared."""
    return range(0, max(1, size), step)


def _part(size: int, ranks: int) -> int:
    """Bytes of a slot that each rank has."""
    return size // ranks // ALIGNED * ALIGNED


def slices(nbytes: int, ranks: int, itemsize: int) -> list[tuple[int, int]]:
    """First and last byte of the slice of each rank: whole elements, nearly equal."""
    count = nbytes // itemsize
    bounds = [count * rank // ranks * itemsize for rank in range(ranks)]
    bounds.append(nbytes)
    return list(pairwise(bounds))
