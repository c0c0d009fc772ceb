"""ArrayRecord, by Google's package: a block is a run of records of some megabytes.

Its reader opens files by their paths, so they have to lie on this machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spartito.data.blocks.formats import (
    TARGET,
    Columns,
    FileIndex,
    Span,
    even_blocks,
    nothing_fetched,
    rows_before,
)
from spartito.errors import UserError
from spartito.packages import package
from spartito.storage.files import File, RangeReader

COLUMN = "record"
OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
"""Nothing is read beyond a block: several are read at the same time."""

_GROUP = re.compile(r"group_size:(\d+)")


class ArrayRecords:
    """Reads records, which are bytes.

    Args:
        columns: None, or ``("record",)``: there is no other.

    Raises:
        UserError: Another column, or the package array_record is not installed.
    """

    name = "array_record"
    suffixes = (".array_record", ".arrayrecord")

    def __init__(self, columns: tuple[str, ...] | None = None) -> None:
        if columns not in (None, (COLUMN,)):
            raise UserError(
                f"ArrayRecord files have no column {columns[0]!r}",
                f"It is {COLUMN!r}, bytes: make columns of it by .map().",
            )
        _package()

    def index(self, file: RangeReader, facts: File) -> FileIndex:
        """As `Format.index`."""
        if not file.local:
            raise UserError(
                f"ArrayRecord files are read from this machine's file systems, not from {file.url}",
                "Copy or mount them, or write Parquet, which is read anywhere.",
            )
        with _opened(file.url) as reader:
            rows = reader.num_records()
            if not reader.ok():  # it says nothing by itself, and has no records
                raise UserError(f"{facts.name} is no whole ArrayRecord file: {_fault(reader)}")
            said = _GROUP.search(reader.writer_options_string() or "")
        together = int(said[1]) if said else 1
        return FileIndex(even_blocks(rows, facts.size, TARGET, together), file.url.encode())

    spans = staticmethod(nothing_fetched)

    def columns(self, index: FileIndex, block: int, parts: Sequence[tuple[Span, bytes]]) -> Columns:
        """As `Format.columns`."""
        first = rows_before(index, block)
        with _opened(index.head.decode()) as reader:
            return {COLUMN: reader.read(first, first + index.blocks[block].rows)}


def _package() -> Any:
    name = "array_record.python.array_record_module"
    remedy = "pip install 'spartito[array-record]'."
    return package(name, "ArrayRecord files cannot be read", remedy)


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    reader = _package().ArrayRecordReader(path, OPTIONS)
    try:
        yield reader
    finally:
        if reader.ok():  # else closing raises what was said already
            reader.close()


def _fault(reader: Any) -> str:
    try:
        reader.close()
    except RuntimeError as error:
        return str(error)
    return "it has no records"
