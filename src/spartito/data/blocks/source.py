"""Packed examples as a source of batches."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spartito.data.blocks.formats import Columns, Format, Missing
from spartito.data.blocks.index import Blocks
from spartito.data.blocks.reading import BlockFiles, BlockReader, check_unchanged
from spartito.data.images.decode import MODES, Color, pixels_of
from spartito.data.images.headers import ImageFault
from spartito.data.images.image_source import empty_pixels, tensor_of
from spartito.data.reading.collate import collate
from spartito.data.reading.order import Indices
from spartito.data.source import BatchSource, Found
from spartito.errors import CorruptSampleError, UserError
from spartito.names import plural, size
from spartito.storage.files import Files
from spartito.storage.span_cache import SpanCache


@dataclass(frozen=True, eq=False)
class PackedSource(BatchSource):
    """Examples in blocks of packed files.

    An example is a dict of its columns, or a tuple of those that were chosen, or one alone.
    Reading is safe from many threads.

    Args:
        files: Where the files lie.
        format: What they are.
        blocks: Their blocks.
        cache: Keeps what was fetched; None: they are read where they lie.
        columns: Those that were chosen, in their order; None: all.
        image_size: Height and width of images, to which they are decoded; None: bytes stay.
        color: Of images.
        dtype: Of images.
    """

    files: Files
    format: Format
    blocks: Blocks
    cache: SpanCache | None = None
    columns: tuple[str, ...] | None = None
    image_size: tuple[int, int] | None = None
    color: Color = "rgb"
    dtype: torch.dtype = torch.float32
    _own: dict[str, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """How many examples there are."""
        return int(self.edges[-1])

    def __getstate__(self) -> dict[str, Any]:
        """Another process has threads of its own."""
        return {**self.__dict__, "_own": {}}

    @property
    def edges(self) -> Indices:
        """The first example of each block, and the number of all: int64 ``(blocks + 1,)``."""
        return self.blocks.edges

    @property
    def reader(self) -> BlockReader[Columns]:
        """What reads the blocks."""
        if "reader" not in self._own:
            read = BlockFiles(self.files, self.format, self.blocks, self.cache)
            self._own.setdefault(
                "reader", BlockReader(read.load, self.blocks.bytes // max(1, len(self.blocks)))
            )
        found: BlockReader[Columns] = self._own["reader"]
        return found

    def expect(self, blocks: Sequence[int], live: int) -> None:
        """As `BlockSource.expect`.

        Raises:
            UserError: A file is another than when it was opened.
        """
        check_unchanged(self.files, self.blocks.files)
        self.reader.expect(blocks, live)

    def __getitem__(self, index: int) -> Any:
        """One example.

        Raises:
            CorruptSampleError: It cannot be read.
        """
        block, row = self._where(np.array([index]))
        columns = self.reader.get(block.tolist())[int(block[0])]
        raw = {name: _raw(columns, name, int(row[0])) for name in columns}
        return self._shaped({name: self._value(value, name, index) for name, value in raw.items()})

    def read_batch(self, indices: Sequence[int]) -> Found:
        """As `BatchSource.read_batch`: columns of numbers are gathered as a whole."""
        if not len(indices):
            return Found(None, [], [])
        block, row = self._where(np.asarray(indices, dtype=np.int64))
        found = self.reader.get(dict.fromkeys(block.tolist()))
        names = dict.fromkeys(name for columns in found.values() for name in columns)
        batch: dict[str, Any] = {}
        corrupt: dict[int, str] = {}
        for name in names:
            arrays = {each: found[each].get(name) for each in found}
            if _are_alike(list(arrays.values())):
                batch[name] = _gathered(arrays, block, row)
                continue
            wanted = zip(block.tolist(), row.tolist(), strict=True)
            raw = [_raw(found[each], name, at) for each, at in wanted]
            # Pixels become floating where they stay, in the batch.
            are_images = self._are_images(raw)
            values: Any = self._empty(len(raw)) if are_images else [None] * len(raw)
            read = self._decoded if are_images else self._value
            for position, value in enumerate(raw):
                try:
                    values[position] = read(value, name, indices[position])
                except CorruptSampleError as error:
                    corrupt.setdefault(position, str(error))
            batch[name] = values
        kept = [position for position in range(len(indices)) if position not in corrupt]
        wrong = [(indices[position], corrupt[position]) for position in sorted(corrupt)]
        if not kept:
            return Found(None, kept, wrong)
        rows = {name: self._collated(values, kept) for name, values in batch.items()}
        return Found(self._shaped(rows), kept, wrong)

    def check_columns(self) -> None:
        """Read the first block, and raise where none of its examples has a chosen column.

        Raises:
            UserError: So it is, or the block cannot be read.
        """
        for name, column in self.reader.get([0])[0].items():
            if all(isinstance(column[row], Missing) for row in range(len(column))):
                file = self.blocks.files[0]
                raise UserError(
                    f"none of the first {len(column)} examples of {self.files.url}/{file.name} "
                    f"has a column {name!r}",
                    "Without columns=... an example is a dict of all that it has.",
                )

    def describe(self) -> str:
        """What is read from where."""
        rows, files = np.diff(self.edges), plural(len(self.blocks.files), "file")
        where = "read where they lie" if self.cache is None else f"kept in {self.cache.folder}"
        return (
            f"{self.files.url}: {self.format.name}, {files} of {size(self.blocks.bytes)}, {where}\n"
            f"{len(self):,} examples in {len(rows):,} blocks of up to {rows.max():,}"
        )

    def locate(self, index: int) -> str:
        """Where an example lies, for people."""
        block, _ = self._where(np.array([index]))
        file, _, number = self.blocks.find(int(block[0]))
        first = self.edges[int(block[0]) - number]
        return f"{self.files.url}/{file.name}, example {index - int(first)}"

    def _where(self, indices: Indices) -> tuple[Indices, Indices]:
        """The blocks of examples, and their rows there."""
        block = np.searchsorted(self.edges, indices, side="right") - 1
        return block, indices - self.edges[block]

    def _value(self, value: Any, name: str, index: int) -> Any:
        """One value; of an image a tensor ``(channels, height, width)``.

        Raises:
            CorruptSampleError: It cannot be read.
        """
        found = self._decoded(value, name, index)
        is_image = self.image_size is not None and isinstance(value, bytes)
        return tensor_of(found, self.dtype) if is_image else found

    def _decoded(self, value: Any, name: str, index: int) -> Any:
        """One value; of an image its pixels ``(height, width, channels)``.

        Raises:
            CorruptSampleError: It cannot be read.
        """
        if isinstance(value, Missing):
            raise CorruptSampleError(f"{name!r} of {self.locate(index)} {value.why}")
        if isinstance(value, np.ndarray | dict | list):
            return deepcopy(value)  # the block stays, and what is made of an example may not
        if self.image_size is None or not isinstance(value, bytes):
            return value
        try:
            return pixels_of(value, None, self.image_size, self.color)
        except ImageFault as fault:
            raise CorruptSampleError(
                f"{name!r} of {self.locate(index)} is no good image ({fault.kind}): {fault.detail}"
            ) from fault

    def _empty(self, count: int) -> Any:
        """For the pixels of some images."""
        assert self.image_size is not None
        return empty_pixels((count, *self.image_size, len(MODES[self.color])), self.dtype)

    def _are_images(self, values: list[Any]) -> bool:
        """Whether a column is decoded: it has bytes, and nothing else."""
        if self.image_size is None or not any(isinstance(each, bytes) for each in values):
            return False
        return all(isinstance(each, bytes | Missing) for each in values)

    def _collated(self, values: Any, kept: list[int]) -> Any:
        if isinstance(values, np.ndarray):  # the pixels of images
            whole = values if len(kept) == len(values) else values[kept]
            return torch.from_numpy(whole).to(self.dtype).permute(0, 3, 1, 2)
        if isinstance(values, Tensor):
            return values if len(kept) == len(values) else values[kept]
        return collate([values[position] for position in kept])

    def _shaped(self, values: dict[str, Any]) -> Any:
        if self.columns is None:
            return values
        chosen = tuple(values[name] for name in self.columns)
        return chosen if len(chosen) > 1 else chosen[0]


def _raw(columns: Columns, name: str, row: int) -> Any:
    return columns[name][row] if name in columns else Missing("is not there")


def _are_alike(columns: list[Any]) -> bool:
    """Whether a column is numbers in all blocks, of one shape and type."""
    if not all(isinstance(column, np.ndarray) and column.dtype != object for column in columns):
        return False
    return len({(column.dtype, column.shape[1:]) for column in columns}) == 1


def _gathered(arrays: dict[int, Any], block: Indices, row: Indices) -> Tensor:
    """The rows of a batch from the arrays of its blocks."""
    if len(arrays) == 1:
        return torch.from_numpy(next(iter(arrays.values()))[row])
    first = next(iter(arrays.values()))
    out = np.empty((len(row), *first.shape[1:]), first.dtype)
    for each, array in arrays.items():
        here = np.flatnonzero(block == each)
        out[here] = array[row[here]]
    return torch.from_numpy(out)
