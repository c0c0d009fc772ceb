"""Tars as WebDataset writes them: the files of a sample follow each other and share a name.

A sample is known by all before the first dot of the last part of the name, a column by all after
it: ``0001.jpg`` and ``0001.cls`` are the columns ``jpg`` and ``cls`` of the sample ``0001``. A
block is a run of samples of some megabytes, which is a tar by itself, without its end.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
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
from spartito.errors import UserError
from spartito.storage.files import File, RangeReader

AHEAD = 1 << 20
"""Bytes that are read at once when a tar is looked through."""
KEY = "__key__"
"""The column with the names of the samples."""
ABSENT = Missing("is not there")


class Tars:
    """Reads tars of samples.

    Args:
        columns: Those to be read; None: all.
    """

    name = "webdataset"
    suffixes = (".tar",)

    def __init__(self, columns: tuple[str, ...] | None = None) -> None:
        self._columns = columns

    def index(self, file: RangeReader, facts: File) -> FileIndex:
        """As `Format.index`: looks at the head of each file in the tar."""
        blocks: list[Block] = []
        start, rows, key, end = 0, 0, None, 0
        try:
            with tarfile.open(fileobj=io.BufferedReader(file, AHEAD), mode="r:") as tar:
                held: Any = tar
                for member in tar:
                    if end > facts.size:
                        break
                    if not member.isfile():
                        continue
                    sample = split_name(member.name)[0]
                    if sample != key:
                        if member.offset - start >= TARGET and rows:
                            blocks.append(Block(rows, start, member.offset))
                            start, rows = member.offset, 0
                        rows, key = rows + 1, sample
                    end = member.offset_data + -(-member.size // 512) * 512
                    held.members = []  # else it keeps them all
        except (tarfile.TarError, EOFError) as error:
            raise UserError(
                f"{facts.name} is no whole tar: {error}", "Is it compressed?"
            ) from error
        if end + 512 > facts.size:
            raise UserError(f"{facts.name} is no whole tar: it has no end after its last file")
        if rows:
            blocks.append(Block(rows, start, end))
        return FileIndex(blocks)

    spans = staticmethod(whole_block)

    def columns(self, index: FileIndex, block: int, parts: Sequence[tuple[Span, bytes]]) -> Columns:
        """As `Format.columns`."""
        samples: list[dict[str, Any]] = []
        for name, data in _members(parts[0][1]):
            key, column = split_name(name)
            if not samples or samples[-1][KEY] != key:
                samples.append({KEY: key})
            if self._columns is None or column in self._columns:
                samples[-1][column] = _decoded(column, data)
        names = self._columns or tuple(dict.fromkeys(n for sample in samples for n in sample))
        return {name: [sample.get(name, ABSENT) for sample in samples] for name in names}


def split_name(name: str) -> tuple[str, str]:
    """The sample and the column that a file in a tar is of."""
    folder, slash, last = name.rpartition("/")
    stem, _, column = last.partition(".")
    return f"{folder}{slash}{stem}", column.lower()


def names_in(block: bytes) -> list[str]:
    """The names of the files in a block."""
    with tarfile.open(fileobj=io.BytesIO(block), mode="r:") as tar:
        return [member.name for member in tar if member.isfile()]


def _members(data: bytes) -> Iterator[tuple[str, bytes]]:
    view = memoryview(data)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            if member.isfile():
                start = member.offset_data
                yield member.name, bytes(view[start : start + member.size])


def _decoded(column: str, data: bytes) -> Any:
    """The value of a file by its ending; of one that is not known its bytes."""
    decode = DECODERS.get(column.rpartition(".")[2])
    if decode is None:
        return data
    try:
        return decode(data)
    except (ValueError, UnicodeDecodeError) as error:
        return Missing(f"is no {column}: {error}", True)


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "cls": lambda data: int(data.decode()),
    "cls2": lambda data: int(data.decode()),
    "txt": lambda data: data.decode(),
    "text": lambda data: data.decode(),
    "json": json.loads,
    "npy": _array,
}
"""What endings mean. Pickles are not opened: they may run anything."""
