"""Some of the examples of packed files: one side of a split, or those that a rule keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from spartito.data.blocks.formats import Columns, Format, Missing
from spartito.data.blocks.index import Blocks
from spartito.data.blocks.source import PackedSource
from spartito.data.reading.order import Indices
from spartito.data.reading.progress import Progress
from spartito.data.source import BatchSource, Found
from spartito.errors import UserError
from spartito.numeric import is_whole
from spartito.storage.files import File, Files
from spartito.storage.span_cache import Entry, SpanCache
from spartito.storage.whole_files import read_cached

Rule = Callable[[Any], Any]
"""Whether an example with this value is kept."""

THREADS = 16
"""Files whose columns are read together."""
VERSION = "1"
"""Of the hashes that are kept of a file."""


@dataclass(frozen=True, eq=False)
class ChosenSource(BatchSource):
    """Some of the examples of a `PackedSource`, in the order in which they lie.

    Args:
        whole: All of them.
        indices: Those that are in it, ascending.
    """

    whole: PackedSource
    indices: Indices

    def __len__(self) -> int:
        """How many examples there are."""
        return len(self.indices)

    @property
    def edges(self) -> Indices:
        """As `BlockSource.edges`; a block of which nothing was chosen is empty."""
        return np.searchsorted(self.indices, self.whole.edges).astype(np.int64)

    def expect(self, blocks: Sequence[int], live: int) -> None:
        """As `BlockSource.expect`: empty blocks are not fetched."""
        rows = np.diff(self.edges)
        self.whole.expect([block for block in blocks if rows[block]], live)

    def __getitem__(self, index: int) -> Any:
        """One example.

        Raises:
            CorruptSampleError: It cannot be read.
        """
        return self.whole[int(self.indices[index])]

    def read_batch(self, indices: Sequence[int]) -> Found:
        asked = np.asarray(indices, dtype=np.int64)
        found = self.whole.read_batch(self.indices[asked].tolist())
        own = np.searchsorted(self.indices, [index for index, _ in found.corrupt]).tolist()
        corrupt = [(index, why) for index, (_, why) in zip(own, found.corrupt, strict=True)]
        return found._replace(corrupt=corrupt)

    def describe(self) -> str:
        """How many of how many, and what is read for them."""
        return f"{len(self):,} of these:\n{self.whole.describe()}"


@dataclass(frozen=True)
class Columnar:
    """Packed files of which single columns are read.

    Args:
        files: Where they lie.
        blocks: Their blocks.
        make: The format that reads one column.
        cache: Keeps what was fetched; None: they are read where they lie.
    """

    files: Files
    blocks: Blocks
    make: Callable[[str], Format]
    cache: SpanCache | None

    def values(self, number: int, name: str) -> Iterator[Any]:
        """The values of a column in one of the files, one after the other, numbers as Python's.

        Raises:
            UserError: The file cannot be read, or an example has no such value.
        """
        file, index, reads = self.blocks.files[number], self.blocks.indexes[number], self.make(name)
        row = 0
        for block in range(len(index.blocks)):
            parts = [
                (span, read_cached(self.files, file, *span, self.cache))
                for span in reads.spans(index, block)
            ]
            columns: Columns = reads.columns(index, block, parts)
            column = columns.get(name, [Missing("is not there")] * index.blocks[block].rows)
            for value in column:
                if isinstance(value, Missing):
                    raise UserError(
                        f"{name!r} of {self.files.url}/{file.name}, example {row}, {value.why}",
                        "Choose by a column that every example has.",
                    )
                yield value.item() if isinstance(value, np.generic) else value
                row += 1

    def each(self, what: Callable[[int], npt.NDArray[Any]], doing: str) -> npt.NDArray[Any]:
        """What is found for each file, one after the other, with its progress."""
        count = len(self.blocks.files)
        with Progress(doing) as progress, ThreadPoolExecutor(THREADS) as pool:
            found = []
            for number, part in enumerate(pool.map(what, range(count)), start=1):
                found.append(part)
                progress.update(number, count)
        return np.concatenate(found)


def kept_by(columnar: Columnar, rules: Mapping[str, Rule]) -> npt.NDArray[np.bool_]:
    """Which examples all rules keep.

    Args:
        columnar: The files.
        rules: For a column, from its value to whether the example is kept.

    Returns:
        One for each example, in their order.

    Raises:
        UserError: An example has no such column, or a rule fails.
    """

    def kept(number: int) -> npt.NDArray[np.bool_]:
        index = columnar.blocks.indexes[number]
        found = np.ones(sum(block.rows for block in index.blocks), dtype=np.bool_)
        for name, rule in rules.items():
            for row, value in enumerate(columnar.values(number, name)):
                try:
                    found[row] &= bool(rule(value))
                except Exception as error:
                    raise UserError(
                        f"where={{{name!r}: ...}} fails for {value!r}: {error}",
                        "It gets one value, and returns whether the example is kept.",
                    ) from error
        return found

    return columnar.each(kept, "looked at")


def hashes_of(
    columnar: Columnar, key: str | None, seed: int, cache: SpanCache
) -> npt.NDArray[np.uint64]:
    """A number for each example that says on which side of a split it is.

    Args:
        columnar: The files.
        key: The column whose value decides, so that equal ones come to one side; None: its file
            and its number there. Either way files that are added move no example.
        seed: Other numbers for another seed.
        cache: Keeps the numbers of keys.

    Returns:
        One for each example, in their order, even over all of uint64.

    Raises:
        UserError: An example has no such key, or one that is no text, bytes or whole number.
    """

    def by_position(number: int) -> npt.NDArray[np.uint64]:
        file, index = columnar.blocks.files[number], columnar.blocks.indexes[number]
        rows = sum(block.rows for block in index.blocks)
        words = np.array([_hash(file.name.encode()), seed], dtype=np.uint64)
        return np.random.Philox(key=words).random_raw(rows)

    def by_key(number: int) -> npt.NDArray[np.uint64]:
        assert key is not None
        file = columnar.blocks.files[number]

        def make() -> bytes:
            keys = (_key_bytes(key, value, seed) for value in columnar.values(number, key))
            return np.array([_hash(each) for each in keys], "<u8").tobytes()

        if not file.version:
            return np.frombuffer(make(), "<u8")
        return np.frombuffer(cache.get(_entry(columnar.files, file, key, seed), make), "<u8")

    if key is None:
        return columnar.each(by_position, "divided")
    return columnar.each(by_key, "divided")


def _entry(files: Files, file: File, key: str, seed: int) -> Entry:
    words = (files.url, file.name, str(file.size), file.version, key, str(seed))
    return Entry(("hashes", VERSION, *words))


def _key_bytes(name: str, value: Any, seed: int) -> bytes:
    if is_whole(value):
        value = str(value)
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        raise UserError(
            f"key={name!r} has a {type(value).__name__}", "Divide by texts, bytes or whole numbers."
        )
    return b"%d\0" % seed + value


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
