"""Which examples the global batches of one pass have, whoever decides it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor

from spartito.data.dataset import Dataset, describe_sampler, known_length
from spartito.data.reading.draws import Draws
from spartito.data.reading.order import by_length, permutation, spread
from spartito.data.source import BlockSource, OrderedSource, Source
from spartito.errors import UserError


class Pass(Protocol):
    """The global batches of one pass over examples by index."""

    def __len__(self) -> int: ...

    def size(self, step: int) -> int:
        """How many examples the global batch of ``step`` has."""
        ...

    def indices(self, step: int, rows: slice | Tensor) -> slice | Tensor:
        """The examples at ``rows`` of the global batch of ``step``."""
        ...

    @property
    def checksum(self) -> int:
        """A CRC-32 of the examples in their order."""
        ...


@dataclass(frozen=True)
class EvenPass:
    """``count`` examples in batches of one size; ``order`` None takes them as they come."""

    count: int
    batch_size: int
    steps: int
    order: Tensor | None

    def __len__(self) -> int:
        return self.steps

    def size(self, step: int) -> int:
        """As `Pass.size`."""
        return min(self.batch_size, self.count - step * self.batch_size)

    def indices(self, step: int, rows: slice | Tensor) -> slice | Tensor:
        """As `Pass.indices`."""
        first = step * self.batch_size
        if isinstance(rows, slice):
            where: slice | Tensor = slice(first + rows.start, first + rows.stop)
        else:
            where = first + rows
        return where if self.order is None else self.order[where]

    @cached_property
    def checksum(self) -> int:
        """As `Pass.checksum`: 7 ms for a million examples."""
        return crc32(b"%d" % self.count if self.order is None else self.order.numpy().data)


@dataclass(frozen=True)
class DrawnPass:
    """The batches that a sampler of the user drew."""

    batches: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.batches)

    def size(self, step: int) -> int:
        """As `Pass.size`."""
        return len(self.batches[step])

    def indices(self, step: int, rows: slice | Tensor) -> slice | Tensor:
        """As `Pass.indices`."""
        return self.batches[step][rows]

    @cached_property
    def checksum(self) -> int:
        """As `Pass.checksum`."""
        found = 0
        for batch in self.batches:
            found = crc32(batch.contiguous().numpy().data, found)
        return found


class Passes:
    """The passes over a data set; the last one is kept.

    Work may come in short ranges of a pass, and sorting ten million keys for each takes a second.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._kept: tuple[int, Pass] | None = None

    def of(self, epoch: int) -> Pass:
        """As `make_pass`."""
        if self._kept is None or self._kept[0] != epoch:
            self._kept = epoch, make_pass(self._dataset, self._seed, epoch)
        return self._kept[1]


def make_pass(dataset: Dataset, seed: int, epoch: int) -> Pass:
    """The global batches of pass ``epoch``: a function of (seed, epoch), if samplers are."""
    if dataset.batch_sampler is not None:
        assert isinstance(dataset.source, Source)
        return DrawnPass(draw(dataset.batch_sampler, seed, epoch, len(dataset.source)))
    assert dataset.examples is not None
    assert dataset.batch_size is not None
    assert dataset.steps_per_pass is not None
    order = order_of(dataset, seed, epoch)
    return EvenPass(dataset.examples, dataset.batch_size, dataset.steps_per_pass, order)


def order_of(dataset: Dataset, seed: int, epoch: int) -> Tensor | None:
    """The examples of pass ``epoch`` in their order, ``(examples,)``; None: as they lie.

    A source of blocks hears in which order these will be used.
    """
    source = dataset.source
    if isinstance(source, OrderedSource):
        return torch.from_numpy(source.order(seed, epoch))
    if not isinstance(source, BlockSource):
        assert dataset.examples is not None
        if not dataset.shuffled:
            return None
        found = permutation(dataset.examples, seed, epoch)
        if dataset.lengths is not None and dataset.batch_size is not None:
            found = by_length(found, dataset.lengths, dataset.batch_size, seed, epoch)
        return torch.from_numpy(found)
    if not dataset.shuffled or dataset.live is None:
        source.expect(range(len(source.edges) - 1), 1)
        return None
    examples, blocks = spread(source.edges, dataset.live, seed, epoch)
    source.expect(blocks.tolist(), dataset.live)
    return torch.from_numpy(examples)


MOST = 200_000
"""Examples of a pass, beside a hundred times those that there are, until a sampler has no end."""


def draw(
    batch_sampler: Iterable[Sequence[int]], seed: int, epoch: int, count: int = 0
) -> list[Tensor]:
    """All batches of pass ``epoch`` over ``count`` examples, each int64 of shape ``(n,)``.

    A sampler that draws from a global generator, from a `torch.Generator` of its own, or by
    ``set_epoch`` draws the same on every replica, and again when training is resumed.
    """
    with ExitStack() as restored:
        for part in (batch_sampler, getattr(batch_sampler, "sampler", None)):
            for value in getattr(part, "__dict__", {}).values():
                if isinstance(value, torch.Generator):
                    restored.callback(value.set_state, value.get_state())
                    value.manual_seed((value.initial_seed() + epoch) % 2**63)
            if part is not None and hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        restored.enter_context(Draws(seed, epoch))
        most = 100 * count + MOST if known_length(batch_sampler) is None else None
        batches, drawn = list[Tensor](), 0
        for batch in batch_sampler:
            batches.append(_numbers(batch, batch_sampler))
            if not len(batches[-1]):
                raise UserError(
                    f"{describe_sampler(batch_sampler)} drew batch {len(batches)} of pass {epoch} "
                    "without an example",
                    "Leave such batches out: a mean over none is no number.",
                )
            drawn += len(batches[-1])
            if most is not None and drawn > most:
                raise UserError(
                    f"{describe_sampler(batch_sampler)} seems to have no end: {drawn:,} examples "
                    f"in pass {epoch}, of {count:,}",
                    "End it after one pass. With steps_per_epoch, epochs go on over the end of "
                    "a pass.",
                )
    if not batches:
        raise UserError(
            f"{describe_sampler(batch_sampler)} gave no batch in pass {epoch}",
            "A sampler can be iterated once for each pass; a generator is used up after the first.",
        )
    return batches


def _numbers(batch: Any, batch_sampler: Any) -> Tensor:
    try:
        return torch.as_tensor(batch, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{describe_sampler(batch_sampler)} draws no numbers of examples: {error}",
            "Number the examples, from 0 on, and look up the key in __getitem__.",
        ) from error
