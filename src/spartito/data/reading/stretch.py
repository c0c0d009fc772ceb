"""A stretch of a data set: examples that lie one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spartito.data.memory import Arrays
from spartito.data.source import BatchSource, Found, GatherSource, Source


@dataclass(frozen=True)
class Stretch:
    """The examples of a source from ``start`` to before ``stop``.

    Args:
        source: Where they are.
        start: The first one.
        stop: The one after the last.
    """

    source: Source
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.source[self.start + index]


@dataclass(frozen=True)
class GatheredStretch(Stretch):
    """The same of a source that reads many at once."""

    source: GatherSource

    def gather(self, indices: Any) -> Any:
        """As `GatherSource.gather`."""
        if isinstance(indices, slice):
            first, last, step = indices.indices(len(self))
            return self.source.gather(slice(self.start + first, self.start + last, step))
        return self.source.gather(indices + self.start)


class ReadStretch(BatchSource):
    """The same of a source that reads several into a batch.

    Args:
        source: Where they are.
        start: The first one.
        stop: The one after the last.
    """

    def __init__(self, source: Any, start: int, stop: int) -> None:
        self._examples, self._source = Stretch(source, start, stop), source
        self.collate = source.collate

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        return self._examples[index]

    def read_batch(self, indices: Any) -> Found:
        start = self._examples.start
        found = self._source.read_batch([start + index for index in indices])
        corrupt = [(index - start, why) for index, why in found.corrupt]
        return Found(found.data, found.kept, corrupt)


def stretch(source: Source, start: int, stop: int) -> Source:
    """The examples of ``source`` from ``start`` to before ``stop``, read as it reads.

    Args:
        source: Examples by index, in an order of their own.
        start: The first one.
        stop: The one after the last.
    """
    if isinstance(source, Arrays):
        return source.stretch(start, stop)
    if isinstance(source, GatherSource):
        return GatheredStretch(source, start, stop)
    if isinstance(source, BatchSource):
        return ReadStretch(source, start, stop)
    return Stretch(source, start, stop)
