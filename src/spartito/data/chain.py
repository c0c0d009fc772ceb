"""What is to be done with a source, as plain values: what the loaders read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from spartito.data.collate import collate
from spartito.data.order import share, steps
from spartito.data.source import BatchStream, ExampleStream, GatherSource, PerWorker, Source
from spartito.data.transforms import RandomTransform

Change = Callable[..., Any] | RandomTransform
Origin = Source | ExampleStream | BatchStream | PerWorker


@dataclass(frozen=True)
class Chain:
    """A source, and what happens to its examples on the way into a batch.

    ``batch_size`` is global; None before ``.batch``. ``repeats`` passes make an epoch, None has
    no end. ``ahead`` batches are read by ``threads`` in the background. ``padded`` fills the
    last batch up by repeating its last example, so that every replica has as many rows (for
    predictions). ``classes`` are the names of the labels, where they are known.
    ``batch_sampler`` draws the global batches in place of all that. ``processes`` is a torch
    loader whose worker processes are to read the examples. ``least`` rows are the fewest that a
    replica with rows gets of a whole batch.
    """

    source: Origin
    example_maps: tuple[Change, ...] = ()
    batch_maps: tuple[Callable[..., Any], ...] = ()
    batch_size: int | None = None
    drop_remainder: bool = False
    shuffled: bool = False
    seed: int | None = None
    repeats: int | None = 1
    ahead: int = 0
    threads: int = 1
    corrupt_limit: int | None = None
    padded: bool = False
    collate: Callable[[list[Any]], Any] = field(default=collate, repr=False)
    classes: tuple[str, ...] = ()
    batch_sampler: Iterable[Sequence[int]] | None = field(default=None, repr=False)
    processes: DataLoader[Any] | None = field(default=None, repr=False)
    least: int = 1

    def share(self, size: int, rank: int, world_size: int) -> range:
        """The places of a global batch of ``size`` that replica ``rank`` computes.

        A batch smaller than the others is not cut into single rows: what normalizes over a batch
        cannot use them, and the time for them is short. Places of a padded one go past its end.
        """
        if self.padded:
            return share(-(-size // world_size) * world_size, rank, world_size)
        is_rest = self.batch_size is not None and size < self.batch_size
        return share(size, rank, world_size, 2 if is_rest else self.least)

    @property
    def batched(self) -> bool:
        """Whether it has batches: ``.batch`` was called, or the data brought some."""
        return self.batch_size is not None or self.batch_sampler is not None

    @property
    def examples(self) -> int | None:
        """The number of examples of one pass, None where nobody knows."""
        if self.batch_sampler is not None:
            return None
        return len(self.source) if isinstance(self.source, Source) else None

    @property
    def steps_per_pass(self) -> int | None:
        """The number of global batches of one pass, None where nobody knows."""
        if self.batch_sampler is not None:
            return len(self.batch_sampler) if isinstance(self.batch_sampler, Sized) else None
        if self.examples is None or self.batch_size is None:
            return None
        return steps(self.examples, self.batch_size, self.drop_remainder)

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of global batches of an epoch, None where nobody knows or it has no end."""
        if self.steps_per_pass is None or self.repeats is None:
            return None
        return self.steps_per_pass * self.repeats

    @property
    def gathers(self) -> bool:
        """Whether whole batches can be read at once."""
        return isinstance(self.source, GatherSource) and not self.example_maps
