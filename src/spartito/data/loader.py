"""One replica's view of a data set: its share of every global batch, from any point on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from spartito.data.batch import Batch
from spartito.data.chain import Chain, Change
from spartito.data.collate import count_rows, take, tidy
from spartito.data.order import example_generator, permutation, share
from spartito.data.prefetch import read_ahead
from spartito.data.source import BatchStream, ExampleStream, InputContext, PerWorker
from spartito.data.transforms import RandomTransform
from spartito.errors import CorruptSampleError, UserError
from spartito.log import warn

Task = Callable[[], Batch]


class Feed(Protocol):
    """One pass over a source for one replica, as tasks that each make one batch."""

    def tasks(self, epoch: int, start: int) -> Iterator[Task]:
        """The batches of pass ``epoch`` from step ``start`` on."""
        ...


class Loader:
    """Iterates over one epoch of a data set at a time; the next iteration is the next epoch.

    ``rank`` of ``world_size`` replicas reads its share of each global batch. ``seed`` shuffles
    where the data set has no seed of its own. `state` answers the place after the last batch
    that was given out, wherever the reading ahead is; `load_state` goes there.
    """

    def __init__(self, dataset: Chain, rank: int = 0, world_size: int = 1, seed: int = 0) -> None:
        size = dataset.batch_size
        if size is not None and size < world_size:
            raise UserError(
                f"a global batch of {size} for {world_size} replicas",
                "The global batch is divided among the replicas: each needs at least one example.",
            )
        if dataset.examples == 0:
            raise UserError("the data set has no examples")
        if dataset.steps_per_pass == 0:
            raise UserError(
                f"{dataset.examples} examples are fewer than one batch of {size}",
                "Choose a smaller batch, or keep the remainder.",
            )
        self.dataset = dataset
        self._feed = make_feed(dataset, rank, world_size, seed)
        self._pass = 0
        self._step = 0

    def __iter__(self) -> Iterator[Batch]:
        """From the present place to the end of the epoch (of the passes that it has)."""
        repeats = self.dataset.repeats
        while True:
            fresh = self._step == 0
            yield from self._rest_of_pass()
            if fresh and self._step == 0:
                raise UserError("the data set has no examples")
            self._pass, self._step = self._pass + 1, 0
            if repeats is not None and self._pass % repeats == 0:
                return

    def endless(self) -> Iterator[Batch]:
        """From the present place on, pass after pass."""
        while True:
            yield from self

    def state(self) -> dict[str, int]:
        """The place of the next batch: pass and step."""
        return {"pass": self._pass, "step": self._step}

    def load_state(self, state: dict[str, int]) -> None:
        """Go to a place that `state` answered, under any number of replicas."""
        self._pass, self._step = state["pass"], state["step"]

    def _rest_of_pass(self) -> Iterator[Batch]:
        tasks = self._feed.tasks(self._pass, self._step)
        batches = read_ahead(tasks, self.dataset.ahead, self.dataset.threads)
        try:
            for batch in batches:
                self._step = batch.step + 1
                yield batch
        finally:
            batches.close()  # type: ignore[attr-defined]


def examples(dataset: Chain) -> Iterator[Any]:
    """One epoch of a data set without batches, on one replica; corrupt examples are left out."""
    source = dataset.source
    feed = None if isinstance(source, ExampleStream) else IndexedFeed(dataset, 0, 1, 0)
    for epoch in count() if dataset.repeats is None else range(dataset.repeats):
        if feed is not None:
            yield from feed.examples(epoch)
        elif isinstance(source, ExampleStream):
            for index, example in enumerate(source.examples):
                yield _changed(dataset.example_maps, example, 0, epoch, index)


def make_feed(dataset: Chain, rank: int, world_size: int, seed: int) -> Feed:
    """What makes the batches of replica ``rank`` of ``world_size`` out of a data set's source."""
    if isinstance(dataset.source, PerWorker):
        return PerWorkerFeed(dataset, dataset.source, rank, world_size)
    if isinstance(dataset.source, ExampleStream | BatchStream):
        return StreamFeed(dataset, rank, world_size, seed)
    if dataset.batch_size is None:
        raise UserError("a data set without batches", "Call .batch(size) at its end.")
    return IndexedFeed(dataset, rank, world_size, seed)


def _mapped(functions: tuple[Callable[..., Any], ...], data: Any) -> Any:
    for function in functions:
        data = function(*data) if isinstance(data, tuple) else function(data)
    return data


def _changed(maps: tuple[Change, ...], example: Any, seed: int, epoch: int, index: int) -> Any:
    """``example`` after all that happens to it; what is random depends on its index alone."""
    generator = None
    for change in maps:
        if isinstance(change, RandomTransform):
            generator = generator or example_generator(seed, epoch, index)
            example = change.apply(example, generator)
        else:
            example = _mapped((change,), example)
    return example


@dataclass(frozen=True, slots=True)
class _Share:
    """Rows ``start`` to ``stop`` of a global batch; their places, past the end the last one."""

    start: int
    stop: int
    places: Tensor


def _numbers(indices: slice | Tensor) -> Sequence[int]:
    return range(indices.start, indices.stop) if isinstance(indices, slice) else indices.tolist()


class IndexedFeed:
    """Examples by index: the order is made first, then only this replica's share is read."""

    def __init__(self, dataset: Chain, rank: int, world_size: int, seed: int) -> None:
        self._dataset = dataset
        self._rank, self._world_size = rank, world_size
        self._seed = seed if dataset.seed is None else dataset.seed
        self._source: Any = dataset.source
        self._count = dataset.examples or 0
        self._gathers = dataset.gathers
        self._skipped: set[int] = set()
        self._template: Any = None
        limit = dataset.corrupt_limit
        self._limit = max(10, self._count // 100) if limit is None else limit

    def tasks(self, epoch: int, start: int) -> Iterator[Task]:
        """As `Feed.tasks`."""
        dataset, count = self._dataset, self._count
        batch_size, all_steps = dataset.batch_size, dataset.steps_per_pass
        assert batch_size is not None
        assert all_steps is not None
        order = (
            torch.from_numpy(permutation(count, self._seed, epoch)) if dataset.shuffled else None
        )
        full = self._share(batch_size)
        for step in range(start, all_steps):
            first = step * batch_size
            size = min(batch_size, count - first)
            mine = full if size == batch_size else self._share(size)
            yield partial(self._batch, epoch, step, order, first, size, mine)

    def examples(self, epoch: int) -> Iterator[Any]:
        """The examples of pass ``epoch``, one after the other."""
        order: Sequence[int] = range(self._count)
        if self._dataset.shuffled:
            order = permutation(self._count, self._seed, epoch).tolist()
        for index in order:
            try:
                example = self._example(epoch, index)
            except CorruptSampleError as error:
                self._skip(index, error)
            else:
                yield example

    def _share(self, size: int) -> _Share:
        world = self._world_size
        filled = -(-size // world) * world if self._dataset.padded else size
        span = share(filled, self._rank, world)
        return _Share(
            span.start, span.stop, torch.arange(span.start, span.stop).clamp(max=size - 1)
        )

    def _batch(
        self, epoch: int, step: int, order: Tensor | None, first: int, size: int, mine: _Share
    ) -> Batch:
        where: slice | Tensor = (
            slice(first + mine.start, first + mine.stop)
            if mine.stop <= size
            else first + mine.places
        )
        chosen = where if order is None else order[where]
        places = mine.places
        if self._gathers:
            data = self._source.gather(chosen)
        else:
            data, kept = self._read(epoch, _numbers(chosen))
            if len(kept) < len(places):
                places = places[kept]
        data = _mapped(self._dataset.batch_maps, data)
        return Batch(data, len(places), size, places, epoch, step)

    def _read(self, epoch: int, indices: Sequence[int]) -> tuple[Any, list[int]]:
        """The examples at ``indices`` as a batch, and which of them could be read."""
        examples, kept = [], []
        for place, index in enumerate(indices):
            try:
                examples.append(self._example(epoch, index))
            except CorruptSampleError as error:
                self._skip(index, error)
            else:
                kept.append(place)
        if examples:
            data = tidy(self._dataset.collate(examples))
            if self._template is None:
                self._template = take(data, torch.empty(0, dtype=torch.int64))
            return data, kept
        return self._empty(epoch), kept

    def _example(self, epoch: int, index: int) -> Any:
        maps = self._dataset.example_maps
        return _changed(maps, self._source[index], self._seed, epoch, index)

    def _empty(self, epoch: int) -> Any:
        """A batch without rows, shaped like one that has some."""
        for index in range(self._count):
            if self._template is not None:
                break
            if index not in self._skipped:
                self._read(epoch, [index])
        if self._template is None:
            raise UserError("not one example of the data set can be read")
        return self._template

    def _skip(self, index: int, error: CorruptSampleError) -> None:
        if index in self._skipped:
            return
        self._skipped.add(index)
        if len(self._skipped) > self._limit:
            raise UserError(
                f"{len(self._skipped)} examples cannot be read, the last: {error}",
                f"Up to {self._limit} are skipped. `spartito data check DIR` finds them all.",
            ) from error
        warn("skipped (%d so far): %s", len(self._skipped), error)


class StreamFeed:
    """A stream that every replica reads whole and in the same order; each keeps its share."""

    def __init__(self, dataset: Chain, rank: int, world_size: int, seed: int) -> None:
        self._dataset, self._rank, self._world_size = dataset, rank, world_size
        self._seed = seed

    def tasks(self, epoch: int, start: int) -> Iterator[Task]:
        """As `Feed.tasks`; resuming reads past what was seen before."""
        for step, data in enumerate(islice(self._batches(epoch), start, None), start):
            yield partial(self._batch, epoch, step, data)

    def _batches(self, epoch: int) -> Iterator[Any]:
        source, size = self._dataset.source, self._dataset.batch_size
        if isinstance(source, BatchStream):
            for batch in source.batches:
                yield tidy(batch)
            return
        assert isinstance(source, ExampleStream)
        assert size is not None
        examples = enumerate(source.examples)
        while group := list(islice(examples, size)):
            if len(group) == size or not self._dataset.drop_remainder:
                maps = self._dataset.example_maps
                yield self._dataset.collate(
                    [_changed(maps, found, self._seed, epoch, index) for index, found in group]
                )

    def _batch(self, epoch: int, step: int, data: Any) -> Batch:
        size = count_rows(data)
        world = self._world_size
        filled = -(-size // world) * world if self._dataset.padded else size
        span = share(filled, self._rank, world)
        places = torch.arange(span.start, span.stop).clamp(max=size - 1)
        mine = _mapped(self._dataset.batch_maps, take(data, places))
        return Batch(mine, len(span), size, places, epoch, step)


class PerWorkerFeed:
    """Local batches of the user's own making."""

    def __init__(self, dataset: Chain, source: PerWorker, rank: int, world_size: int) -> None:
        self._dataset, self._source = dataset, source
        self._rank, self._world_size = rank, world_size

    def tasks(self, epoch: int, start: int) -> Iterator[Task]:
        """As `Feed.tasks`; resuming reads past what was seen before."""
        context = InputContext(self._rank, self._world_size, epoch)
        for step, data in enumerate(islice(self._source.function(context), start, None), start):
            yield partial(self._batch, epoch, step, data)

    def _batch(self, epoch: int, step: int, data: Any) -> Batch:
        data = _mapped(self._dataset.batch_maps, tidy(data))
        size = count_rows(data)
        places = torch.arange(self._rank * size, (self._rank + 1) * size)
        return Batch(data, size, size * self._world_size, places, epoch, step)
