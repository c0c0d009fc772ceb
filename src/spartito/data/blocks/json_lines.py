"""JSON lines: an object in each line. A block is a run of whole lines of some megabytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from spartito.data.blocks.formats import (
    TARGET,
    Block,
    Columns,
    FileIndex,
    Missing,
    Span,
    whole_block,
)
from spartito.storage.files import File, RangeReader


class JsonLines:
    """Reads lines of JSON.

    Args:
        columns: The keys to be read; None: all.
    """

    name = "jsonl"
    suffixes = (".jsonl", ".ndjson")

    def __init__(self, columns: tuple[str, ...] | None = None) -> None:
        self._columns = columns

    def index(self, file: RangeReader, facts: File) -> FileIndex:
        """As `Format.index`: reads the file once, for where its lines end."""
        blocks: list[Block] = []
        start, rest = 0, b""
        while data := file.read(TARGET):
            whole, newline, tail = (rest + data).rpartition(b"\n")
            if newline:  # else a line is longer than a block
                stop = start + len(whole) + 1
                blocks.append(Block(_count(whole), start, stop))
                start = stop
            rest = tail
        blocks.append(Block(_count(rest), start, start + len(rest)))
        return FileIndex([block for block in blocks if block.rows])

    spans = staticmethod(whole_block)

    def columns(self, index: FileIndex, block: int, parts: Sequence[tuple[Span, bytes]]) -> Columns:
        """As `Format.columns`."""
        rows = [_object(line) for line in parts[0][1].split(b"\n") if line.strip()]
        names = self._columns
        if names is None:
            names = tuple(dict.fromkeys(n for row in rows if isinstance(row, dict) for n in row))
        return {name: [_value(row, name) for row in rows] for name in names}


def _count(data: bytes) -> int:
    return sum(bool(line.strip()) for line in data.split(b"\n"))


def _object(line: bytes) -> dict[str, Any] | Missing:
    try:
        found = json.loads(line)
    except ValueError as error:
        return Missing(f"is in a line that is no JSON: {error}", True)
    return found if isinstance(found, dict) else Missing("is in a line that is no object", True)


def _value(row: dict[str, Any] | Missing, name: str) -> Any:
    if isinstance(row, Missing):
        return row
    found = row.get(name)
    if found is None:
        return Missing("is not there")
    if isinstance(found, list):
        array = _array(found)
        return found if array is None else array
    return found


def _array(values: list[Any]) -> Any:
    """Lists of numbers as an array; None where they are something else."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists of several lengths
        return None
    return array if array.dtype.kind in "bif" else None
