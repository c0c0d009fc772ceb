"""Blocks in memory: fetched ahead by threads, in the order in which they will be wanted."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from spartito.data.blocks.formats import Columns, Format, Span
from spartito.data.blocks.index import Blocks
from spartito.errors import UserError
from spartito.storage.files import File, Files
from spartito.storage.span_cache import SpanCache
from spartito.storage.whole_files import entry_of, read_cached

T = TypeVar("T")

THREADS = 16
"""Blocks that are fetched together, at most: each is in memory two or three times by then."""
AHEAD = 4, 32
"""Blocks that are in memory before somebody wants them: the fewest, and the most."""
BYTES = 16 << 20
"""Of all these together, within that: so that one which has to be asked for again is no stop."""


def ahead_of(size: int) -> int:
    """How many blocks are in memory before somebody wants them, where one has ``size`` bytes."""
    return min(AHEAD[1], max(AHEAD[0], BYTES // max(1, size)))


@dataclass(frozen=True, eq=False)
class BlockFiles:
    """Files whose blocks are read one by one.

    Args:
        files: Where they lie.
        format: What they are.
        blocks: All blocks.
        cache: Keeps what was fetched; None: they are read where they lie.
    """

    files: Files
    format: Format
    blocks: Blocks
    cache: SpanCache | None

    def load(self, block: int) -> Columns:
        """The examples of a block.

        Raises:
            UserError: It cannot be read, or is not what its index says.
        """
        return self.decoded(block, self.parts(block))

    def parts(self, block: int) -> list[tuple[Span, bytes]]:
        """The parts of a file that a block is decoded from.

        Raises:
            UserError: They cannot be read.
        """
        file, index, number = self.blocks.find(block)
        spans = self.format.spans(index, number)
        return [(span, read_cached(self.files, file, *span, self.cache)) for span in spans]

    def is_cached(self, block: int) -> bool:
        """Whether all parts of a block are in the cache."""
        file, index, number = self.blocks.find(block)
        spans = self.format.spans(index, number)
        entries = (entry_of(self.files, file, *span) for span in spans)
        return self.cache is not None and all(map(self.cache.has, entries))

    def decoded(self, block: int, parts: Sequence[tuple[Span, bytes]]) -> Columns:
        """The examples of a block, of its parts.

        Raises:
            UserError: They are not what the index says.
        """
        file, index, number = self.blocks.find(block)
        try:
            columns = self.format.columns(index, number, parts)
        except UserError as error:
            raise UserError(f"{self.files.url}/{file.name}: {error}") from error
        except Exception as error:
            raise UserError(
                f"{self.files.url}/{file.name}, block {number}, is not what its beginning or "
                f"end says: {error}",
                "It may be damaged, or have been replaced while it is read.",
            ) from error
        rows = index.blocks[number].rows
        for name, column in columns.items():
            if len(column) != rows:
                raise UserError(
                    f"{self.files.url}/{file.name}, block {number}, has {len(column)} values of "
                    f"{name!r}, and {rows} examples by its index",
                    "It may have been replaced while it is read.",
                )
        return columns


def check_unchanged(files: Files, found: Iterable[File]) -> None:
    """Refuse files of this machine that were written since their blocks were found.

    Blocks that are in memory would show what was there. A store is not asked: one reply of it
    takes longer than all of this.

    Args:
        files: Where they lie.
        found: They, as they were.

    Raises:
        UserError: One is another now, or is gone.
    """
    for file in found if files.local else ():
        if file.version and files.look(file.name) != file:
            raise UserError(
                f"{files.url}/{file.name} was written after it was opened",
                "Make the data set anew, and write new data into files of other names: "
                "a training may be reading these.",
            )


class BlockReader(Generic[T]):
    """Gives blocks, and keeps those that will be wanted again.

    Args:
        load: Reads the block of a number, in any thread.
        size: Bytes of a block, about.
    """

    def __init__(self, load: Callable[[int], T], size: int = BYTES) -> None:
        self._load = load
        self._ahead = ahead_of(size)
        threads = min(THREADS, self._ahead)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spartito block")
        self._kept: OrderedDict[int, Future[T]] = OrderedDict()
        self._lock = threading.Lock()
        self._order: Sequence[int] = ()
        self._positions: dict[int, int] = {}
        self._live = 1
        self._front = 0

    def expect(self, order: Sequence[int], live: int) -> None:
        """Say which blocks will be wanted.

        Args:
            order: All of a pass, in the order in which each is wanted first.
            live: How many are wanted at the same time, at most.
        """
        with self._lock:
            self._order, self._live, self._front = order, live, 0
            self._positions = {block: position for position, block in enumerate(order)}

    def get(self, wanted: Iterable[int]) -> dict[int, T]:
        """Some blocks, which are read together.

        Raises:
            UserError: One cannot be read, or is not what its index says.
        """
        with self._lock:
            futures = {block: self._ask(block) for block in wanted}
            last = max((self._positions.get(block, -1) for block in futures), default=-1)
            if last >= 0:
                self._front = max(self._front, last)
                for block in self._order[self._front + 1 : self._front + 1 + self._ahead]:
                    self._ask(block)
            self._forget()
        try:
            return {block: future.result() for block, future in futures.items()}
        except BaseException:
            with self._lock:  # so that it is tried again by who asks again
                for block in [b for b, f in self._kept.items() if f.done() and f.exception()]:
                    del self._kept[block]
            raise

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, block: int) -> Future[T]:
        """The block to come; the lock is held."""
        if block not in self._kept:
            self._kept[block] = self._pool.submit(self._load, block)
        self._kept.move_to_end(block)
        return self._kept[block]

    def _forget(self) -> None:
        """Let go of those that were not wanted for the longest time; the lock is held."""
        for block in list(self._kept):
            if len(self._kept) <= self._live + self._ahead + 1:
                return
            if self._kept[block].done():
                del self._kept[block]
