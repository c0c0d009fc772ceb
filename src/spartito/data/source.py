"""Where examples come from, by what each kind can promise.

| source | order | resume in the middle of an epoch | each replica reads |
|---|---|---|---|
| map-style (``__len__``, ``__getitem__``) | shuffled as a whole, any number of replicas | exact | its slice |
| stream of examples (an ``IterableDataset``) | as it comes | exact if it repeats itself; reads past what was seen | everything, keeps its slice |
| stream of batches (a ``DataLoader`` with its own sampler) | as it comes | likewise | everything, keeps its slice |
| `PerWorker` (a function per replica) | the user's | likewise, per replica | what its function gives |
"""  # noqa: E501

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from spartito.data.reading.collate import collate
from spartito.data.reading.order import DataShard, Indices


@runtime_checkable
class Source(Protocol):
    """Examples by index. A torch map-style ``Dataset`` is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class GatherSource(Source, Protocol):
    """Examples that can be read many at once, already stacked."""

    def gather(self, indices: Any) -> Any:
        """The examples at ``indices`` (a slice, or int64 of shape ``(n,)``) as one batch."""
        ...


class Found(NamedTuple):
    """A batch, None where no example could be read; ``kept`` are the positions of its rows.

    ``corrupt`` has (index, message) of the examples that could not be read.
    """

    data: Any
    kept: list[int]
    corrupt: list[tuple[int, str]]


class BatchSource(ABC):
    """Examples by index that know how to read several straight into a batch.

    Attributes:
        collate: What makes the same batch of single examples.
    """

    collate: Callable[[Sequence[Any]], Any] = staticmethod(collate)

    @abstractmethod
    def read_batch(self, indices: Sequence[int]) -> Found:
        """What single reading and `collate` would make of ``indices``, without the corrupt."""


@runtime_checkable
class BlockSource(Source, Protocol):
    """Examples in blocks, each of which is cheap to read as a whole, and dear in parts."""

    @property
    def edges(self) -> Indices:
        """The first example of each block, and the number of all: int64 ``(blocks + 1,)``."""
        ...

    def expect(self, blocks: Sequence[int], live: int) -> None:
        """Hear in which order blocks will be used, and how many of them at a time."""
        ...


@runtime_checkable
class OrderedSource(Protocol):
    """Examples by index that decide their own order; an index may be beyond their number."""

    @property
    def form(self) -> str:
        """What the order depends on beside seed and pass, in words that can be compared."""
        ...

    def order(self, seed: int, epoch: int) -> Indices:
        """The examples of pass ``epoch`` in their order, as many as there are."""
        ...


@runtime_checkable
class Described(Protocol):
    """A source that says what is read from where."""

    def describe(self) -> str:
        """For people, in some lines."""
        ...


@dataclass(frozen=True)
class ExampleStream:
    """Examples one after the other; iterating again starts again."""

    examples: Iterable[Any]

    def begin(self, epoch: int) -> None:
        """Say which pass is next to what asks for it by ``set_epoch``."""
        _set_epoch(self.examples, epoch)


@dataclass(frozen=True)
class BatchStream:
    """Global batches one after the other; iterating again starts again."""

    batches: Iterable[Any]

    def begin(self, epoch: int) -> None:
        """As `ExampleStream.begin`: to a loader's data set."""
        _set_epoch(getattr(self.batches, "dataset", self.batches), epoch)


def _set_epoch(stream: Any, epoch: int) -> None:
    if callable(getattr(stream, "set_epoch", None)):
        stream.set_epoch(epoch)


@dataclass(frozen=True)
class InputContext:
    """What a `per_worker` function gets.

    Attributes:
        data_shard: The index of the data shard that it makes, and how many there are. Replicas
            that compute on the same data have the same one.
        epoch: The pass over the data, from 0.
    """

    data_shard: DataShard
    epoch: int


@dataclass(frozen=True)
class PerWorker:
    """Local batches that each replica makes for itself by ``function(context)``."""

    function: Callable[[InputContext], Iterable[Any]]
