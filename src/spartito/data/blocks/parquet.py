"""Parquet, by pyarrow: a block is a row group, of which only the chosen columns are fetched."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from spartito.data.blocks.arrow_columns import column_values
from spartito.data.blocks.formats import Block, Columns, FileIndex, Span, chosen_columns
from spartito.errors import UserError
from spartito.packages import package
from spartito.storage.files import File, RangeReader, Seekable

MAGIC = b"PAR1"
GAP = 64 << 10
"""Bytes between two wanted parts that are fetched with them rather than asked for apart."""


class Parquet:
    """Reads row groups.

    Args:
        columns: Those to be read; None: all.

    Raises:
        UserError: pyarrow is not installed.
    """

    name = "parquet"
    suffixes = (".parquet",)

    def __init__(self, columns: tuple[str, ...] | None = None) -> None:
        self._columns = columns
        self._parquet, self._arrow = pyarrow("read")

    def index(self, file: RangeReader, facts: File) -> FileIndex:
        """As `Format.index`: of the file only its footer is read."""
        file.seek(max(0, facts.size - (64 << 10)))
        tail = file.read() or b""
        if facts.size < 12 or tail[-4:] != MAGIC:
            raise UserError(f"{facts.name} is no whole Parquet file: its end is not PAR1")
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if length > facts.size:
            raise UserError(f"{facts.name} is no whole Parquet file: its footer is cut off")
        if length > len(tail):
            file.seek(facts.size - length)
            tail = file.read() or b""
        head = tail[-length:]
        metadata = self._metadata(head)
        blocks = []
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if group.num_rows:
                spans = [_span(group.column(c)) for c in range(group.num_columns)]
                first, last = min(s for s, _ in spans), max(e for _, e in spans)
                blocks.append(Block(group.num_rows, first, last))
        return FileIndex(blocks, head)

    def spans(self, index: FileIndex, block: int) -> list[Span]:
        """As `Format.spans`: the parts of chosen columns, those that lie close as one."""
        metadata = self._metadata(index.head)
        group = metadata.row_group(self._group(metadata, block))
        chosen = self._chosen(metadata)
        wanted = sorted(
            _span(group.column(number))
            for number in range(group.num_columns)
            if chosen is None or _is_of(group.column(number).path_in_schema, chosen)
        )
        return list(_joined(wanted))

    def columns(self, index: FileIndex, block: int, parts: Sequence[tuple[Span, bytes]]) -> Columns:
        """As `Format.columns`."""
        metadata = self._metadata(index.head)
        file = self._arrow.PythonFile(_Parts(parts), mode="r")
        read = self._parquet.ParquetFile(file, metadata=metadata, pre_buffer=False)
        chosen = self._chosen(metadata)
        group = self._group(metadata, block)
        table = read.read_row_group(group, columns=chosen, use_threads=False)
        return {name: column_values(table.column(name)) for name in chosen or table.column_names}

    def _metadata(self, head: bytes) -> Any:
        return self._parquet.read_metadata(io.BytesIO(MAGIC + head))

    def _chosen(self, metadata: Any) -> list[str] | None:
        if self._columns is None:
            return None
        return chosen_columns(self._columns, metadata.schema.to_arrow_schema().names)

    @staticmethod
    def _group(metadata: Any, block: int) -> int:
        """The row group of a block: those without rows are none."""
        filled = (g for g in range(metadata.num_row_groups) if metadata.row_group(g).num_rows)
        return next(number for position, number in enumerate(filled) if position == block)


def pyarrow(done: str) -> tuple[Any, Any]:
    """``pyarrow.parquet`` and ``pyarrow``; a `UserError` says what files cannot be without."""
    why = f"Parquet files cannot be {done}", "pip install 'spartito[parquet]'."
    return package("pyarrow.parquet", *why), package("pyarrow", *why)


class _Parts(Seekable):
    """A file of which only some parts are there."""

    def __init__(self, parts: Sequence[tuple[Span, bytes]]) -> None:
        super().__init__(parts[-1][0][1] if parts else 0)
        self._starts, self._parts = [span[0] for span, _ in parts], parts

    def read(self, size: int = -1) -> Any:  # arrow takes a view, so that nothing is copied
        position = bisect_right(self._starts, self._at) - 1
        (start, stop), data = self._parts[position]
        if not start <= self._at <= self._at + size <= stop:
            raise EOFError(f"bytes {self._at} to {self._at + size} were not fetched")
        found = memoryview(data)[self._at - start : self._at - start + size]
        self._at += size
        return found


def _is_of(path: str, chosen: Sequence[str]) -> bool:
    """Whether a path is of a chosen column, or of a part of it; names may have dots."""
    return any(path == name or path.startswith(f"{name}.") for name in chosen)


def _span(column: Any) -> Span:
    """Where the part of a column in a row group lies."""
    start = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset:
        start = min(start, column.dictionary_page_offset)
    return start, start + column.total_compressed_size


def _joined(spans: Sequence[Span]) -> Iterator[Span]:
    """Spans in order, those that are close to each other as one."""
    start, stop = spans[0]
    for first, last in spans[1:]:
        if first - stop > GAP:
            yield start, stop
            start = first
        stop = max(stop, last)
    yield start, stop
