"""The formats in which shards are written, each by the library that is kept for it.

A writer gets rows one after the other and writes a file front to back, the same bytes each time
for the same rows. What a format cannot hold is refused before anything of it is written.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from spartito.data.blocks.parquet import pyarrow
from spartito.data.blocks.tars import DECODERS
from spartito.data.packing.columns import KEY, Column, Row, plain_key
from spartito.errors import UserError
from spartito.names import nearest

BLOCK = 4 << 20
"""Bytes of a row group, about: what is read and shuffled as one."""


class ShardWriter(Protocol):
    """Writes the rows of one shard."""

    def add(self, row: Row) -> None:
        """The next row.

        Raises:
            UserError: The format cannot hold it.
        """
        ...

    def close(self) -> None:
        """Write what is left, and the end of the file, which stays open."""
        ...


class Writing(Protocol):
    """How shards of a format are written."""

    suffix: str
    """Of the files."""
    names: Mapping[str, str]
    """What the format calls columns, where that is another name."""
    version: str
    """Of what decides the bytes beside the rows."""

    def begin(self, file: io.RawIOBase) -> ShardWriter:
        """A writer of a new file."""
        ...


class ParquetWriting:
    """Writes Parquet by pyarrow, in row groups of some megabytes.

    Images are not compressed again, and columns have no statistics: they would hold images.

    Args:
        columns: What examples have.

    Raises:
        UserError: pyarrow is not installed, or Parquet has no such column.
    """

    suffix = ".parquet"

    def __init__(self, columns: Sequence[Column]) -> None:
        self._parquet, self._arrow = pyarrow("written")
        self.names: Mapping[str, str] = {}
        self.version = f"pyarrow {self._arrow.__version__}, row groups of {BLOCK}"
        self._columns = {column.name: column for column in columns}
        fields = [(name, self._type(column)) for name, column in self._columns.items()]
        self.schema: Any = self._arrow.schema([*fields, (KEY, self._arrow.string())])

    def begin(self, file: io.RawIOBase) -> ShardWriter:
        """As `Writing.begin`."""
        plain = {"image", "bytes"}
        codecs = {
            name: "NONE" if name in self._columns and self._columns[name].kind in plain else "ZSTD"
            for name in self.schema.names
        }
        writer = self._parquet.ParquetWriter(
            file, self.schema, compression=codecs, use_dictionary=False, write_statistics=False
        )
        return _ParquetShard(self, writer)

    def table(self, rows: Sequence[Row]) -> Any:
        """Rows as a table of arrow's."""
        arrays = [
            self._array(field, [self._value(field.name, row) for row in rows], rows)
            for field in self.schema
        ]
        return self._arrow.Table.from_arrays(arrays, schema=self.schema)

    def _value(self, name: str, row: Row) -> Any:
        value = row.values.get(name)
        column = self._columns.get(name)
        if column is None:
            return row.key
        if column.kind == "array" and value is not None:
            array = np.asarray(value)
            if array.ndim != 1 or array.dtype.name != column.dtype:
                raise UserError(
                    f"{name!r} of example {row.key!r} is {array.dtype} of shape {array.shape}, and "
                    f"this Parquet column holds lists of {column.dtype}",
                    "Pack as webdataset, which keeps every array as it is.",
                )
        return value

    def _array(self, field: Any, values: list[Any], rows: Sequence[Row]) -> Any:
        try:
            return self._arrow.array(values, field.type)
        except (self._arrow.ArrowInvalid, self._arrow.ArrowTypeError, OverflowError) as error:
            raise UserError(
                f"{field.name!r} of examples {rows[0].key!r} to {rows[-1].key!r} is not "
                f"{field.type} in all of them: {error}",
                "A column of Parquet has one type: give the values one, or leave the column out.",
            ) from error

    def _type(self, column: Column) -> Any:
        arrow = self._arrow
        if column.kind == "json":
            raise UserError(
                f"{column.name!r} holds objects, which may differ from example to example",
                "Pack as jsonl or webdataset, or leave the column out: --columns a,b.",
            )
        if column.kind in ("image", "bytes"):
            return arrow.binary()
        if column.kind == "string":
            return arrow.string()
        if column.kind == "boolean":
            return arrow.bool_()
        number = arrow.from_numpy_dtype(np.dtype(column.dtype))
        return arrow.list_(number) if column.kind == "array" else number


class _ParquetShard:
    """Rows are kept until they fill a row group."""

    def __init__(self, writing: ParquetWriting, writer: Any) -> None:
        self._writing, self._writer = writing, writer
        self._rows: list[Row] = []
        self._bytes = 0

    def add(self, row: Row) -> None:
        self._rows.append(row)
        self._bytes += sum(_size(value) for value in row.values.values())
        if self._bytes >= BLOCK:
            self._flush()

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self._writer.close()

    def _flush(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        if rows:
            self._writer.write_table(self._writing.table(rows), len(rows))


class TarWriting:
    """Writes tars as WebDataset reads them, by Python's own ``tarfile``.

    Args:
        columns: What examples have.

    Raises:
        UserError: Two columns would have one name, or one is none for a file.
    """

    suffix = ".tar"
    version = "tar 1"

    def __init__(self, columns: Sequence[Column]) -> None:
        self.members = {column.name: member_of(column) for column in columns}
        if len({*self.members.values()}) < len(self.members) or any(
            "/" in member for member in self.members.values()
        ):
            raise UserError(
                f"columns {', '.join(map(repr, self.members))} have no names of their own as "
                f"endings of files: {', '.join(self.members.values())}",
                "Pack as parquet.",
            )
        renamed = {name: member for name, member in self.members.items() if name != member}
        self.names: Mapping[str, str] = {**renamed, KEY: "__key__"}
        self._columns = {column.name: column for column in columns}

    def begin(self, file: io.RawIOBase) -> ShardWriter:
        """As `Writing.begin`."""
        return _TarShard(self, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT))

    def encode(self, name: str, row: Row) -> bytes:
        """The content of a file of a sample."""
        value, kind = row.values[name], self._columns[name].kind
        try:
            return _ENCODERS[kind](value)
        except (TypeError, ValueError, AttributeError) as error:
            raise _unlike(self._columns[name], row, error) from error


class _TarShard:
    def __init__(self, writing: TarWriting, tar: tarfile.TarFile) -> None:
        self._writing, self._tar = writing, tar
        self._keys: set[str] = set()

    def add(self, row: Row) -> None:
        key = plain_key(row.key)
        if key in self._keys:
            raise UserError(
                f"two examples have the key {row.key!r}",
                "In a tar they would be one: pack as parquet.",
            )
        self._keys.add(key)
        for name, member in self._writing.members.items():
            if name not in row.values:
                continue
            data = self._writing.encode(name, row)
            info = tarfile.TarInfo(f"{key}.{member}")
            info.size, info.mode = len(data), 0o644
            self._tar.addfile(info, io.BytesIO(data))
            held: Any = self._tar
            held.members = []  # else it keeps them all

    def close(self) -> None:
        self._tar.close()


class LinesWriting:
    """Writes JSON lines.

    Args:
        columns: What examples have.

    Raises:
        UserError: A column holds bytes.
    """

    suffix = ".jsonl"
    version = "jsonl 1"

    def __init__(self, columns: Sequence[Column]) -> None:
        for column in columns:
            if column.kind in ("image", "bytes"):
                raise UserError(
                    f"{column.name!r} holds bytes, which JSON has not",
                    "Pack as parquet or webdataset.",
                )
        self.names: Mapping[str, str] = {}
        self._columns = {column.name: column for column in columns}

    def begin(self, file: io.RawIOBase) -> ShardWriter:
        """As `Writing.begin`."""
        return _LinesShard(self, file)

    def encode(self, row: Row) -> bytes:
        """The line of an example."""
        for name, value in row.values.items():
            try:
                _json(value)
            except (TypeError, ValueError) as error:
                raise _unlike(self._columns[name], row, error) from error
        return _json({KEY: row.key, **row.values}) + b"\n"


class _LinesShard:
    def __init__(self, writing: LinesWriting, file: io.RawIOBase) -> None:
        self._writing, self._file = writing, file

    def add(self, row: Row) -> None:
        self._file.write(self._writing.encode(row))

    def close(self) -> None:
        pass


WRITINGS: dict[str, Callable[[Sequence[Column]], Writing]] = {
    "parquet": ParquetWriting,
    "webdataset": TarWriting,
    "jsonl": LinesWriting,
}
"""The formats that are written."""


def make_writing(format: str, columns: Sequence[Column]) -> Writing:
    """How shards of a format are written.

    Args:
        format: One of `WRITINGS`.
        columns: What examples have.

    Raises:
        UserError: It is none of them, its package is not installed, or it cannot hold a column.
    """
    if format not in WRITINGS:
        raise UserError(f"--format {format} is not written", nearest(format, WRITINGS))
    return WRITINGS[format](columns)


def member_of(column: Column) -> str:
    """What the files of a column end with in a tar, so that they are read as what they are."""
    name = column.name.lower()
    ending = _ENDINGS.get(column.kind, "")
    if column.kind in ("image", "bytes"):
        if name == "image" and column.dtype:
            return _IMAGES.get(column.dtype, name)
        return f"{name}.bin" if name.rpartition(".")[2] in DECODERS else name
    if name == "label" and ending == "cls":
        return ending
    return name if name.rpartition(".")[2] == ending else f"{name}.{ending}"


def _unlike(column: Column, row: Row, error: Exception) -> UserError:
    return UserError(
        f"{column.name!r} of example {row.key!r} is not {column}, as in the first examples: "
        f"{error}",
        "Give all examples one type, or leave the column out: --columns a,b.",
    )


def _json(value: Any) -> bytes:
    text = json.dumps(value, default=_plain, allow_nan=False, separators=(",", ":"))
    return text.encode()


def _plain(value: Any) -> Any:
    """What JSON has for an array or a number of numpy's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON")


def _npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(value), allow_pickle=False)
    return file.getvalue()


def _integer(value: Any) -> bytes:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"it is {type(value).__name__}")
    return b"%d" % int(value)


def _size(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    return value.nbytes if isinstance(value, np.ndarray) else 8


_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "image": lambda value: bytes(memoryview(value)),  # of a number `bytes` makes zeros
    "bytes": lambda value: bytes(memoryview(value)),
    "string": lambda value: value.encode(),
    "integer": _integer,
    "number": _json,
    "boolean": _json,
    "array": _npy,
    "json": _json,
}
_ENDINGS = {
    **dict.fromkeys(("number", "boolean", "json"), "json"),
    "string": "txt",
    "integer": "cls",
    "array": "npy",
}
_IMAGES = {"JPEG": "jpg", "PNG": "png", "GIF": "gif", "BMP": "bmp", "WEBP": "webp"}
