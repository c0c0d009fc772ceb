"""Lance, by its own package, which reads stores by itself: a block is a run of a fragment's rows.

A table is a folder of versions. It counts as one file, whose version is that of the table when it
is opened: what is added later is not seen.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from spartito.data.blocks.arrow_columns import column_values
from spartito.data.blocks.formats import (
    TARGET,
    Columns,
    FileIndex,
    Span,
    chosen_columns,
    even_blocks,
    nothing_fetched,
    rows_before,
)
from spartito.errors import UserError
from spartito.packages import package
from spartito.storage.files import File, Files, RangeReader
from spartito.urls import is_remote, local_path

NAME = "lance"


@dataclass(frozen=True)
class TableFolder(Files):
    """The folder in which one table lies.

    Args:
        url: Of the folder around the table.
        local: Whether it lies in a file system of this machine.
        table: The table as a file.
    """

    url: str
    local: bool
    table: File

    def find(self) -> list[File]:
        return [self.table]

    def look(self, name: str) -> File:
        return self.table

    def read(self, name: str, start: int, stop: int) -> bytes:
        raise UserError(f"{self.url}/{name} is read by its own library")


class LanceTables:
    """Reads tables.

    Args:
        columns: Those to be read; None: all.

    Raises:
        UserError: The package pylance is not installed.
    """

    name = NAME
    suffixes = (".lance",)

    def __init__(self, columns: tuple[str, ...] | None = None) -> None:
        self._columns = columns
        _package()

    def index(self, file: RangeReader, facts: File) -> FileIndex:
        """As `Format.index`: of the table its manifest is read."""
        blocks, fragments = [], []
        for fragment in _opened(file.url, facts.version).get_fragments():
            rows = fragment.count_rows()
            size = _size(fragment) * rows // max(1, fragment.physical_rows)
            blocks += even_blocks(rows, size, TARGET)
            fragments.append([fragment.fragment_id, rows])
        head = {"url": file.url, "version": facts.version, "fragments": fragments}
        return FileIndex(blocks, json.dumps(head).encode())

    spans = staticmethod(nothing_fetched)

    def columns(self, index: FileIndex, block: int, parts: Sequence[tuple[Span, bytes]]) -> Columns:
        """As `Format.columns`."""
        head = json.loads(index.head)
        table = _opened(head["url"], head["version"])
        chosen = chosen_columns(self._columns, table.schema.names)
        ends = list(accumulate(rows for _, rows in head["fragments"]))
        first, rows = rows_before(index, block), index.blocks[block].rows
        number = bisect_right(ends, first)
        first -= ends[number - 1] if number else 0
        fragment = table.get_fragment(head["fragments"][number][0])
        found = fragment.take(range(first, first + rows), columns=chosen)
        return {name: column_values(found.column(name)) for name in chosen}


def is_table(url: str) -> bool:
    """Whether a path or URL names a table of Lance."""
    return url.rstrip("/").endswith(LanceTables.suffixes)


def open_table(url: str) -> tuple[Files, str, list[File]]:
    """A table as the one file of a folder.

    Args:
        url: Its path or URL.

    Returns:
        The folder, the name of the format, and the table in its newest version.

    Raises:
        UserError: It is not there, or pylance is not installed.
    """
    near = local_path(url)
    where = os.path.abspath(os.path.expanduser(near)) if near else url.rstrip("/")
    table = _table(where)
    folder, _, name = where.rpartition("/")
    file = File(name, sum(map(_size, table.get_fragments())), _version(table))
    return TableFolder(folder, not is_remote(where), file), NAME, [file]


def _package() -> Any:
    return package("lance", "tables of Lance cannot be read", "pip install 'spartito[lance]'.")


def _table(url: str, number: int | None = None) -> Any:
    try:
        return _package().dataset(url, version=number)
    except (ValueError, OSError) as error:
        why = str(error).partition(", /")[0]
        raise UserError(f"{url} cannot be read: {why}", "Is it a table of Lance?") from error


def _version(table: Any) -> str:
    """Its number and a digest: a table that was removed and written anew has the same numbers."""
    facts = [str(fragment.metadata) for fragment in table.get_fragments()]
    return f"{table.version} {blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()}"


@lru_cache(8)
def _opened(url: str, version: str) -> Any:
    """A table in a version that it had."""
    table = _table(url, int(version.partition(" ")[0]))
    if _version(table) != version:
        raise UserError(f"{url} has been written anew", "Open it again: packed(...).")
    return table


def _size(fragment: Any) -> int:
    """Bytes of a fragment's files; what old manifests do not say is taken for 4 KiB a row."""
    sizes = [file.file_size_bytes for file in fragment.data_files()]
    return sum(sizes) if all(sizes) else fragment.physical_rows << 12
