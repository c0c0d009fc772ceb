"""Shards of MosaicML Streaming (MDS), so that its data sets are read where they are.

A shard begins with the number of its samples, where each begins (and the last one ends), all
uint32, and a header in JSON that names columns and encodings. A sample has the sizes of its
columns that have no fixed one, then the columns. A block is a run of samples of some megabytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from spartito.data.blocks.formats import (
    TARGET,
    Block,
    Columns,
    FileIndex,
    Span,
    chosen_columns,
    whole_block,
)
from spartito.errors import UserError
from spartito.storage.files import File, RangeReader

_WORD = np.dtype("<u4")
_NUMBERS = frozenset(
    f"{kind}{bits}"
    for kind, sizes in (
        ("uint", (8, 16, 32, 64)),
        ("int", (8, 16, 32, 64)),
        ("float", (16, 32, 64)),
    )
    for bits in sizes
)
_ARRAYS = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4"} | {
    64: "u8",
    65: "i8",
    66: "f8",
}
"""The numbers by which an array that says its own type does so."""
_SHAPES = ("u1", "u2", "u4", "u8")


class Mds:
    """Reads shards of MDS that are not compressed.

    Args:
        columns: Those to be read; None: all.
    """

    name = "mds"
    suffixes = (".mds",)

    def __init__(self, columns: tuple[str, ...] | None = None) -> None:
        self._columns = columns

    def index(self, file: RangeReader, facts: File) -> FileIndex:
        """As `Format.index`: of the file its beginning is read."""
        count = int(np.frombuffer(_exactly(file, facts, 4), _WORD)[0])
        edges = np.frombuffer(_exactly(file, facts, 4 * (count + 1)), _WORD).astype(np.int64)
        start = 4 * (count + 2)
        if not start <= edges[0] <= edges[-1] == facts.size or (np.diff(edges) < 0).any():
            raise UserError(f"{facts.name} is no whole shard of MDS: its samples end elsewhere")
        head = _exactly(file, facts, int(edges[0]) - start)
        blocks, first = [], 0
        while first < count:
            last = int(np.searchsorted(edges, edges[first] + TARGET, "left"))
            last = min(max(first + 1, last), count)
            blocks.append(Block(last - first, int(edges[first]), int(edges[last])))
            first = last
        return FileIndex(blocks, head)

    spans = staticmethod(whole_block)

    def columns(self, index: FileIndex, block: int, parts: Sequence[tuple[Span, bytes]]) -> Columns:
        """As `Format.columns`."""
        header, data, rows = json.loads(index.head), parts[0][1], index.blocks[block].rows
        names, encodings = header["column_names"], header["column_encodings"]
        sizes = header["column_sizes"]
        wanted = chosen_columns(self._columns, names)
        if all(sizes):
            table = np.frombuffer(data, np.uint8).reshape(rows, sum(sizes))
            ends = np.cumsum(sizes)
            found = {
                name: _fixed(encoding, table[:, end - size : end])
                for name, encoding, size, end in zip(names, encodings, sizes, ends, strict=True)
                if name in wanted
            }
        else:
            samples = list(_samples(data, rows, sizes))
            positions = [position for position, name in enumerate(names) if name in wanted]
            decoders = {position: _decoder(encodings[position]) for position in positions}
            found = {
                names[position]: [decoders[position](sample[position]) for sample in samples]
                for position in positions
            }
        return {name: found[name] for name in wanted}


def _exactly(file: RangeReader, facts: File, size: int) -> bytes:
    data = file.read(size) or b""
    if len(data) != size:
        raise UserError(f"{facts.name} is no whole shard of MDS: it ends after {facts.size} bytes")
    return data


def _samples(data: bytes, rows: int, sizes: Sequence[int | None]) -> Iterator[list[bytes]]:
    """The columns of each sample, as they are."""
    at = 0
    for _ in range(rows):
        open_ones = sum(1 for size in sizes if not size)
        told = iter(np.frombuffer(data, _WORD, open_ones, at).tolist())
        at += 4 * open_ones
        sample = []
        for size in (size or next(told) for size in sizes):
            sample.append(data[at : at + size])
            at += size
        yield sample


def _fixed(encoding: str, column: Any) -> Any:
    """A column whose values have one size, of shape ``(rows, bytes)``, as an array."""
    kind, _, rest = encoding.partition(":")
    if kind == "ndarray":
        dtype, _, shape = rest.partition(":")
        lengths = [int(length) for length in shape.split(",")]
        return np.ascontiguousarray(column).view(dtype).reshape(len(column), *lengths)
    if kind == "int" or kind in _NUMBERS:
        return np.ascontiguousarray(column).view("int64" if kind == "int" else kind)[:, 0]
    decode = _decoder(encoding)
    return [decode(row.tobytes()) for row in column]


def _decoder(encoding: str) -> Callable[[bytes], Any]:
    """What reads one value of an encoding."""
    kind, _, rest = encoding.partition(":")
    if kind == "ndarray":
        dtype, _, shape = rest.partition(":")
        return lambda data: _array(data, dtype, tuple(int(n) for n in shape.split(",") if n))
    if kind == "int" or kind in _NUMBERS:
        number = np.dtype("int64" if kind == "int" else kind)
        return lambda data: np.frombuffer(data, number)[0]
    if kind not in _DECODERS:
        raise UserError(
            f"a column with the encoding {encoding!r} is not read",
            "Choose columns without it: columns=(...). A pickle may run anything.",
        )
    return _DECODERS[kind]


def _array(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    """An array that says its type and shape itself where the header does not."""
    at = 0
    if not dtype:
        dtype, at = _ARRAYS[data[0]], 1
    if not shape:
        axes, word = data[at] >> 2, np.dtype(_SHAPES[data[at] & 3])
        shape = tuple(np.frombuffer(data, word, axes, at + 1).tolist())
        at += 1 + axes * word.itemsize
    return np.frombuffer(data, dtype, offset=at).reshape(shape)


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "jpeg": bytes,
    "jpeg_array": bytes,
    "jpegarray": bytes,
    "png": bytes,
    "str": bytes.decode,
    "str_int": int,
    "str_float": float,
    "json": json.loads,
}
"""Encodings by name; images stay in their files' bytes until somebody asks for a size."""
