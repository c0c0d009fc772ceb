"""Examples to be packed: a folder of images, or files that are packed already."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from PIL import __version__ as pillow

from spartito.data.blocks.formats import Columns, Missing
from spartito.data.blocks.locating import Located, PackedSet, open_set
from spartito.data.images.decode import decode
from spartito.data.images.headers import ImageFault, promised_format
from spartito.data.images.image_files import Stamp
from spartito.data.images.labelled import Labelled, find_labelled
from spartito.data.packing.columns import KEY, Column, Row, columns_of, keys_of
from spartito.data.reading.order import Indices, permutation, spread
from spartito.data.reading.progress import Progress
from spartito.urls import is_remote, local_path

UNKNOWN = 100_000
"""Bytes of a file of which a store does not say how large it is."""
ALIVE = 64 << 20
"""Bytes of blocks among which the examples of a packed source are shuffled."""


@dataclass(frozen=True)
class Unread:
    """An example that cannot be read, and why."""

    key: str
    why: str


class Source(Protocol):
    """Examples by index, to be packed."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """What its columns hold; the key is none of them."""
        ...

    @property
    def example(self) -> tuple[str, ...]:
        """The columns that an example has where nobody chooses; (): all."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, where they are known."""
        ...

    @property
    def identity(self) -> dict[str, str]:
        """What its examples follow from, in words that differ where they differ."""
        ...

    @property
    def sizes(self) -> Indices:
        """The bytes of each example, about: int64 ``(examples,)``."""
        ...

    def order(self, seed: int | None) -> Indices:
        """The examples in an order that follows from the seed; None: as they lie."""
        ...

    def rows(self, indices: Sequence[int]) -> Iterator[Row | Unread]:
        """The examples with these indices, in this order. Many threads may call it."""
        ...


@dataclass(frozen=True, eq=False)
class FolderSource:
    """Images in one folder for each class, as the bytes of their files.

    Args:
        directory: The folder, or its URL.
        found: The images in it.
        decoded: Whether each image is decoded, as training does, and left out where that fails.
    """

    directory: str
    found: Labelled
    decoded: bool = True

    @property
    def example(self) -> tuple[str, ...]:
        """As `Source.example`."""
        return "image", "label"

    @property
    def classes(self) -> tuple[str, ...]:
        """As `Source.classes`."""
        return self.found.classes

    @property
    def columns(self) -> tuple[Column, ...]:
        """As `Source.columns`."""
        formats = {promised_format(path) or "" for path in self.found.paths}
        image = formats.pop() if len(formats) == 1 else ""
        return Column("image", "image", image), Column("label", "integer", "int64")

    @cached_property
    def _names(self) -> list[str]:
        """The paths below the folder."""
        cut = len(self.directory.rstrip("/")) + 1
        return [path[cut:] for path in self.found.paths]

    @cached_property
    def _stamps(self) -> list[Stamp]:
        """Size and version of each file; of one that cannot be looked at nothing."""
        stamps, count = list[Stamp](), len(self.found.paths)
        with Progress("looked at") as progress:
            for path in self.found.paths:
                stamps.append(self.found.files.stamp(path) or (0, ""))
                progress.update(len(stamps), count)
        return stamps

    @property
    def identity(self) -> dict[str, str]:
        """As `Source.identity`."""
        facts = zip(self._names, self._stamps, strict=True)
        words = (f"{name}\0{size}\0{version}" for name, (size, version) in facts)
        found = {"source": "images", "files": digest(words), "classes": digest(self.classes)}
        return {**found, "pillow": pillow} if self.decoded else {**found, "corrupt": "kept"}

    @property
    def sizes(self) -> Indices:
        """As `Source.sizes`."""
        return np.array([size or UNKNOWN for size, _ in self._stamps], dtype=np.int64)

    @cached_property
    def _keys(self) -> list[str]:
        return keys_of(self._names)

    def order(self, seed: int | None) -> Indices:
        """As `Source.order`: a permutation of all."""
        count = len(self.found.paths)
        return np.arange(count) if seed is None else permutation(count, seed, 0)

    def rows(self, indices: Sequence[int]) -> Iterator[Row | Unread]:
        """As `Source.rows`."""
        found = self.found
        self.found.files.expect([found.paths[index] for index in indices])
        for index in indices:
            path = found.paths[index]
            try:
                data = found.files.read(path)
                if self.decoded:
                    decode(data, promised_format(path), "RGB", (1, 1))
            except ImageFault as fault:
                yield Unread(self._names[index], f"{fault.kind}: {fault.detail}")
            else:
                yield Row(self._keys[index], {"image": data, "label": found.labels[index]})


def open_folder(directory: str, decoded: bool = True) -> FolderSource:
    """The images below one folder for each class.

    Args:
        directory: The folder that holds them, or its URL.
        decoded: Whether images that cannot be decoded are left out.

    Raises:
        UserError: There is no such folder, fewer than two classes, or no image in one.
    """
    if not is_remote(directory) or local_path(directory):
        directory = os.path.normpath(local_path(directory) or directory)
    return FolderSource(directory, find_labelled(directory), decoded)


@dataclass(frozen=True, eq=False)
class PackedFiles:
    """Examples of files that are packed already, as their format gives them.

    Args:
        opened: The files and their blocks.
        columns: What they hold.
        names: What the format calls columns that have another name.
        raw_key: What the format calls the column with the key; "" where it has none.
    """

    opened: PackedSet
    columns: tuple[Column, ...]
    names: dict[str, str]
    raw_key: str

    @property
    def example(self) -> tuple[str, ...]:
        """As `Source.example`."""
        known = {column.name for column in self.columns}
        manifest = self.opened.where.manifest
        said = manifest.example if manifest else []
        return tuple(said) if known.issuperset(said) else ()

    @property
    def classes(self) -> tuple[str, ...]:
        """As `Source.classes`."""
        return self.opened.where.classes

    @property
    def identity(self) -> dict[str, str]:
        """As `Source.identity`."""
        words = (f"{file.name}\0{file.size}\0{file.version}" for file in self.opened.blocks.files)
        columns = ", ".join(f"{column.name}: {column}" for column in self.columns)
        return {"source": self.opened.format.name, "files": digest(words), "columns": columns}

    @property
    def _block_bytes(self) -> Indices:
        blocks = (block for index in self.opened.blocks.indexes for block in index.blocks)
        return np.array([block.stop - block.start for block in blocks], dtype=np.int64)

    @property
    def sizes(self) -> Indices:
        """As `Source.sizes`: the mean of the block."""
        rows = np.diff(self.opened.blocks.edges)
        return np.repeat(np.maximum(1, self._block_bytes // rows), rows)

    def order(self, seed: int | None) -> Indices:
        """As `Source.order`: examples move among blocks of `ALIVE` bytes together."""
        if seed is None:
            self.opened.reader.expect(range(len(self.opened.blocks)), 1)
            return np.arange(int(self.opened.blocks.edges[-1]))
        live = max(2, round(ALIVE / max(1.0, float(self._block_bytes.mean()))))
        examples, blocks = spread(self.opened.blocks.edges, live, seed, 0)
        self.opened.reader.expect(blocks.tolist(), live)
        return examples

    def rows(self, indices: Sequence[int]) -> Iterator[Row | Unread]:
        """As `Source.rows`: reads each block of these examples once."""
        wanted = np.asarray(indices, dtype=np.int64)
        block = np.searchsorted(self.opened.blocks.edges, wanted, side="right") - 1
        found: dict[int, Row | Unread] = {}
        for each in dict.fromkeys(block.tolist()):
            columns = self.opened.reader.get([each])[each]
            for position in np.flatnonzero(block == each).tolist():
                index = int(wanted[position])
                found[position] = self._row(
                    columns, index - int(self.opened.blocks.edges[each]), index
                )
        return (found.pop(position) for position in range(len(wanted)))

    def _row(self, columns: Columns, row: int, index: int) -> Row | Unread:
        raw = {name: column[row] for name, column in columns.items()}
        key = raw.pop(self.raw_key, None)
        name = f"{index:09d}" if key is None or isinstance(key, Missing) else str(key)
        for column, value in raw.items():
            if isinstance(value, Missing) and value.is_damaged:
                return Unread(name, f"{column!r} {value.why}")
        here = {n: value for n, value in raw.items() if not isinstance(value, Missing)}
        if not here:
            return Unread(name, "it has no value")
        return Row(name, {self.names.get(n, n): value for n, value in here.items()})


def open_packed(where: Located, columns: Sequence[str]) -> PackedFiles:
    """Packed files as a source.

    Args:
        where: The files.
        columns: Those that are packed; () takes all.

    Raises:
        UserError: A file is cut off, there is no such column, or it holds what is not packed.
    """
    manifest = where.manifest
    names = {raw: name for name, raw in manifest.names.items()} if manifest else {}
    raw_key = "__key__" if where.format == "webdataset" else KEY
    chosen: tuple[str, ...] | None = None
    if columns:
        chosen = tuple(where.raw(name) for name in columns)
        if where.format == "webdataset":
            chosen = tuple(dict.fromkeys((*chosen, raw_key)))
    opened = open_set(where, chosen)
    block = opened.reader.get([0])[0]
    first = {name: v for name, v in block.items() if name != raw_key}
    found = columns_of({names.get(name, name): values for name, values in first.items()})
    return PackedFiles(opened, found, names, raw_key)


def digest(words: Iterable[str]) -> str:
    """A hash of words, to compare them by."""
    found = hashlib.sha256()
    for word in words:
        found.update(word.encode("utf-8", "surrogateescape") + b"\0\0")
    return found.hexdigest()[:32]
