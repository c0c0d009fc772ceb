"""What a format of packed files has to say: which blocks a file has, and what is in one.

A package adds a format by an entry point:

    [project.entry-points."spartito.formats"]
    theirs = "package.module:make_format"

``make_format(columns)`` returns a `Format`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Any, Protocol

import msgspec

from spartito.errors import UserError
from spartito.names import nearest
from spartito.storage.files import File, RangeReader

GROUP = "spartito.formats"
"""The entry points by which packages add formats."""
TARGET = 4 << 20
"""Bytes of a block, about."""

Span = tuple[int, int]
"""The first byte of a part of a file, and the one after its last."""

Columns = dict[str, Any]
"""The examples of a block by column: numpy arrays with a row for each, or sequences."""


class Block(msgspec.Struct, frozen=True):
    """A run of examples of a file that are fetched and decoded together.

    Attributes:
        rows: How many examples it has.
        start: Its first byte in the file.
        stop: The byte after its last.
    """

    rows: int
    start: int
    stop: int


class FileIndex(msgspec.Struct, frozen=True):
    """What is known of a file without reading its examples.

    Attributes:
        blocks: Its blocks, in their order.
        head: What the format needs beside a block to decode it, as a footer.
    """

    blocks: list[Block]
    head: bytes = b""


class Missing(msgspec.Struct, frozen=True):
    """Stands in a column where an example has no value that can be used.

    Attributes:
        why: In a few words.
        is_damaged: Whether something is there that cannot be read, rather than nothing.
    """

    why: str
    is_damaged: bool = False


class Format(Protocol):
    """One format of packed files."""

    name: str
    suffixes: tuple[str, ...]

    def index(self, file: RangeReader, facts: File) -> FileIndex:
        """Find the blocks of a file.

        Args:
            file: To be read, in parts.
            facts: Its name and size.

        Raises:
            UserError: It is no such file, or is cut off.
        """
        ...

    def spans(self, index: FileIndex, block: int) -> list[Span]:
        """The parts of the file that have to be fetched for a block.

        Args:
            index: Of its file.
            block: Its number there.
        """
        ...

    def columns(self, index: FileIndex, block: int, parts: Sequence[tuple[Span, bytes]]) -> Columns:
        """The examples of a block.

        Args:
            index: Of its file.
            block: Its number there.
            parts: What `spans` asked for.

        Raises:
            UserError: It is not what the index says.
        """
        ...


Make = Callable[[tuple[str, ...] | None], Format]
"""Makes a format that reads some columns; None reads all."""

_OURS: dict[str, str] = {
    "parquet": "spartito.data.blocks.parquet:Parquet",
    "webdataset": "spartito.data.blocks.tars:Tars",
    "jsonl": "spartito.data.blocks.json_lines:JsonLines",
    "mds": "spartito.data.blocks.mds:Mds",
    "text": "spartito.data.blocks.texts:Texts",
    "array_record": "spartito.data.blocks.array_records:ArrayRecords",
    "lance": "spartito.data.blocks.lance_tables:LanceTables",
}
SUFFIXES = {
    ".parquet": "parquet",
    ".tar": "webdataset",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".mds": "mds",
    ".txt": "text",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
}
"""The format of files whose name ends so."""


@cache
def formats() -> dict[str, Callable[[], Make]]:
    """All formats by name, each as what imports it: ours first, then those of other packages."""
    found: dict[str, Callable[[], Make]] = {
        name: partial(_imported, where) for name, where in _OURS.items()
    }
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, entry.load)
    return found


def make_format(name: str, columns: tuple[str, ...] | None) -> Format:
    """The format of this name.

    Args:
        name: As in `formats`.
        columns: Those to be read; None: all.

    Raises:
        UserError: There is none, or a package that it needs is not installed.
    """
    if name not in formats():
        raise UserError(f"format={name!r} is unknown", nearest(name, formats()))
    return formats()[name]()(columns)


def nothing_fetched(index: FileIndex, block: int) -> list[Span]:
    """No span, for `Format.spans` of formats whose own library reads their files."""
    return []


def chosen_columns(wanted: Sequence[str] | None, there: Sequence[str]) -> list[str]:
    """The columns to be read: those that are wanted, or all; a `UserError` if one is not there."""
    for column in wanted or ():
        if column not in there:
            raise UserError(f"there is no column {column!r}", nearest(column, there))
    return list(wanted or there)


def rows_before(index: FileIndex, block: int) -> int:
    """The number of the first example of a block in its file."""
    return sum(each.rows for each in index.blocks[:block])


def even_blocks(rows: int, size: int, target: int, least: int = 1) -> list[Block]:
    """Blocks of about ``target`` bytes, where it is not known which bytes an example has.

    Args:
        rows: How many examples there are.
        size: Bytes of all of them.
        target: Bytes of a block.
        least: Examples that belong together: a block has a multiple of them.
    """
    wanted = max(1, rows * target // max(1, size))
    step = -(-wanted // least) * least
    edges = [*range(0, rows, step), rows]
    return [
        Block(stop - start, size * start // rows, size * stop // rows)
        for start, stop in pairwise(edges)
        if stop > start
    ]


def whole_block(index: FileIndex, block: int) -> list[Span]:
    """The span of a block that is fetched as a whole, for `Format.spans`."""
    found = index.blocks[block]
    return [(found.start, found.stop)]


def _imported(where: str) -> Make:
    module, _, name = where.partition(":")
    made: Make = getattr(import_module(module), name)
    return made
