"""The blocks of all files of a data set, found once and kept in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from spartito.data.blocks.formats import Block, FileIndex, Format
from spartito.data.reading.order import Indices
from spartito.data.reading.progress import Progress
from spartito.errors import UserError
from spartito.storage.files import File, Files, RangeReader
from spartito.storage.span_cache import Entry, SpanCache

THREADS = 16
"""Files that are looked at together: most of the time is spent waiting for a store."""
VERSION = "1"
"""Of what is kept of a file."""

_read = msgspec.msgpack.Decoder(FileIndex)
_write = msgspec.msgpack.Encoder()


@dataclass(frozen=True, eq=False)
class Blocks:
    """All blocks of a data set, in the order of the files' names.

    Args:
        files: Its files.
        indexes: What is known of each.
    """

    files: tuple[File, ...]
    indexes: tuple[FileIndex, ...]

    def __len__(self) -> int:
        return len(self._all)

    @cached_property
    def _all(self) -> list[tuple[int, int]]:
        """File and number in it, of each block."""
        return [(f, n) for f, index in enumerate(self.indexes) for n in range(len(index.blocks))]

    def position(self, block: int) -> tuple[int, int]:
        """The number of a block's file, and the block's number there."""
        return self._all[block]

    def find(self, block: int) -> tuple[File, FileIndex, int]:
        """The file of a block, what is known of it, and the block's number there."""
        file, number = self._all[block]
        return self.files[file], self.indexes[file], number

    def block(self, block: int) -> Block:
        """One of them."""
        _, index, number = self.find(block)
        return index.blocks[number]

    @cached_property
    def edges(self) -> Indices:
        """The first example of each block, and the number of all: int64 ``(blocks + 1,)``."""
        rows = [block.rows for index in self.indexes for block in index.blocks]
        return np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]).astype(np.int64)

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(file.size for file in self.files)


def find_blocks(
    files: Files, found: Sequence[File], format: Format, cache: SpanCache | None
) -> Blocks:
    """The blocks of files; those of a file that was looked at before are in the cache.

    Args:
        files: Where they lie.
        found: Which ones.
        format: What they are.
        cache: Keeps what is found; None keeps nothing.

    Returns:
        Them.

    Raises:
        UserError: A file is no such file, or is cut off; or there is no example at all.
    """
    indexes: dict[int, FileIndex] = {}
    with Progress("indexed") as progress, ThreadPoolExecutor(THREADS) as pool:
        work = {
            pool.submit(index_of, files, file, format, cache): number
            for number, file in enumerate(found)
        }
        try:
            for done in as_completed(work):
                indexes[work[done]] = done.result()
                progress.update(len(indexes), len(found))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    made = Blocks(tuple(found), tuple(indexes[number] for number in range(len(found))))
    if not len(made):
        raise UserError(
            f"the {len(found)} files in {files.url} have no examples", "Is it the folder?"
        )
    return made


def index_of(files: Files, file: File, format: Format, cache: SpanCache | None) -> FileIndex:
    """The blocks of one file, as `find_blocks` finds them.

    Raises:
        UserError: It is no such file, or is cut off.
    """

    def make() -> bytes:
        try:
            return _write.encode(format.index(RangeReader(files, file), file))
        except UserError as error:
            raise UserError(f"{files.url}: {error}") from error

    if cache is None or not file.version:
        return _read.decode(make())
    words = ("index", VERSION, format.name, files.url, file.name, str(file.size), file.version)
    return _read.decode(cache.get(Entry(words), make))
