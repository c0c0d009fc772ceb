"""Messages from one rank to another on one machine: a sender leaves them and goes on.

Each pair of ranks has a ring of cells in the sender's part of the reserve, which say where each
message lies:

    | number, tag, call, bytes, offset, number when it was taken |

The receiver looks for the first message with the tag that it wants, in the order in which they
were sent. The memory of a message that was taken is used for another of that size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from spartito.backend.calls import different, encode
from spartito.backend.work import Done, Receive
from spartito.collectives.memory.rank_memory import PAGE, Memory, bytes_of
from spartito.collectives.rows import row_to_read, written
from spartito.errors import RefusedCallError
from spartito.system import fences

RESERVE = 16 << 30  # bytes of addresses that each rank has for messages; space is taken when used
CELLS = 256  # messages of a pair that may be under way
CELL = 8  # numbers of a cell
RING = CELLS * CELL * 8  # bytes
NUMBER, TAG, CALL, NBYTES, OFFSET, TAKEN = range(6)


@dataclass(slots=True)
class _Wanted:
    """A receive that was asked for: from rank ``source``, None is any."""

    work: Receive
    tensor: Tensor
    source: int | None
    tag: int


@dataclass(slots=True)
class _Out:
    """The messages to one rank."""

    number: int = 0
    under_way: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Number, offset and size of each."""


@dataclass(slots=True)
class _In:
    """The messages of one rank: the number of the first that was not taken, and who was later."""

    first: int = 0
    taken: set[int] = field(default_factory=set)


class Mail:
    """Messages of a group on one machine; ``memory`` is what its ranks share."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._bytes = bytes_of(memory.segment)
        self._words = self._bytes[: len(self._bytes) // 8 * 8].view(np.int64)
        self._rings: dict[tuple[int, int], int] = {}
        self._out = {rank: _Out() for rank in memory.peers}
        self._in = {rank: _In() for rank in memory.peers}
        self._wanted: deque[_Wanted] = deque()
        heap = memory.reserve_at + memory.rank * RESERVE + -(-RING * memory.size // PAGE) * PAGE
        self._top = self._claimed = heap
        self._end = memory.reserve_at + (memory.rank + 1) * RESERVE
        self._free: dict[int, list[int]] = {}

    def send(self, tensor: Tensor, target: int, tag: int) -> Done:
        """Leave the elements of ``tensor`` for rank ``target``."""
        row, out = row_to_read(tensor), self._out[target]
        call = encode("send", tensor.numel(), tensor.dtype)
        cell = self._cell(self._memory.rank, target, out.number)
        if out.number >= CELLS and self._words[cell + TAKEN] != out.number + 1 - CELLS:
            self._memory.listen(
                lambda: bool(self._words[cell + TAKEN] == out.number + 1 - CELLS),
                lambda: [target],
            )
        fences.acquire()
        size = max(64, 1 << (len(row) - 1).bit_length()) if len(row) else 64
        offset = self._offset(size)
        self._bytes[offset : offset + len(row)] = row
        words = self._words
        words[cell + TAG], words[cell + CALL] = tag, call
        words[cell + NBYTES], words[cell + OFFSET] = len(row), offset
        out.under_way.append((out.number, offset, size))
        out.number += 1
        fences.release()
        words[cell + NUMBER] = out.number
        self._memory.ring(target)
        return Done([tensor])

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> Receive:
        """Want a message of this size from rank ``source``, None is any."""
        row_to_read(tensor)
        work = Receive(tensor, self._progress)
        self._wanted.append(_Wanted(work, tensor, source, tag))
        self._take_all()
        return work

    def _progress(self, work: Receive, wait: bool) -> bool:
        self._take_all()
        if wait and not work.came:
            wanted = next(one for one in self._wanted if one.work is work)
            self._memory.listen(self._until(work), lambda: self._could_send(wanted.source))
        return work.came

    def _until(self, work: Receive) -> Callable[[], bool]:
        def came() -> bool:
            self._take_all()
            return work.came

        return came

    def _could_send(self, source: int | None) -> list[int]:
        if source is not None:
            return [source]
        alive = [rank for rank in self._memory.peers if self._memory.alive(rank)]
        return alive or self._memory.peers

    def _take_all(self) -> None:
        """Take all messages that are there for those who want them, in the order of wanting."""
        for wanted in list(self._wanted):
            sources = self._memory.peers if wanted.source is None else [wanted.source]
            for source in sources:
                if self._take(wanted, source):
                    self._wanted.remove(wanted)
                    break

    def _take(self, wanted: _Wanted, source: int) -> bool:
        box, words = self._in[source], self._words
        number = box.first
        while True:
            cell = self._cell(source, self._memory.rank, number)
            if words[cell + NUMBER] != number + 1:
                return False
            fences.acquire()
            if number not in box.taken and words[cell + TAG] == wanted.tag:
                break
            number += 1
        self._read(wanted.tensor, source, cell)
        fences.release()
        words[cell + TAKEN] = number + 1
        self._memory.ring(source)
        box.taken.add(number)
        while box.first in box.taken:
            box.taken.remove(box.first)
            box.first += 1
        wanted.work.take(source)
        return True

    def _read(self, tensor: Tensor, source: int, cell: int) -> None:
        sent, own = int(self._words[cell + CALL]), encode("send", tensor.numel(), tensor.dtype)
        names, rank = self._memory.names, self._memory.rank
        if sent != own:
            raise different({names[source]: sent, f"{names[rank]}, which receives,": own})
        offset, size = int(self._words[cell + OFFSET]), int(self._words[cell + NBYTES])
        with written([tensor]) as (row,):
            row[:] = self._bytes[offset : offset + size]

    def _cell(self, source: int, target: int, number: int) -> int:
        """Where in the words the cell of a message is."""
        ring = self._rings.get((source, target))
        if ring is None:
            start = self._memory.reserve_at + source * RESERVE + target * RING
            self._memory.claim(start, RING)
            ring = self._rings[source, target] = start // 8
        return ring + number % CELLS * CELL

    def _offset(self, size: int) -> int:
        """Memory for a message of ``size`` bytes, a power of two."""
        for target, out in self._out.items():
            while out.under_way:
                number, offset, freed = out.under_way[0]
                if self._words[self._cell(self._memory.rank, target, number) + TAKEN] <= number:
                    break
                fences.acquire()
                out.under_way.popleft()
                self._free.setdefault(freed, []).append(offset)
        if free := self._free.get(size):
            return free.pop()
        offset, self._top = self._top, self._top + size
        if self._top > self._end:
            raise RefusedCallError(
                f"messages of more than {RESERVE >> 30} GiB that nobody received",
                "Receive them before more are sent.",
            )
        if self._top > self._claimed:
            more = max(self._top - self._claimed, PAGE * 16)
            self._memory.claim(self._claimed, more)
            self._claimed += more
        return offset
