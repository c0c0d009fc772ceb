"""One data shard of a data set: its rows of every global batch, from any point on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice, tee
from typing import Any, Protocol

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from spartito.data.batch import Batch
from spartito.data.dataset import Dataset
from spartito.data.memory import Arrays
from spartito.data.reading.collate import (
    count_rows,
    form,
    head,
    kept_rows,
    part_of,
    rows,
    sizes,
    tidy,
    without_rows,
)
from spartito.data.reading.draws import Draws
from spartito.data.reading.order import DataShard
from spartito.data.reading.passes import Passes, order_of
from spartito.data.reading.placing import HOST, Placing
from spartito.data.reading.prefetch import read_ahead
from spartito.data.reading.readers import Processes, Wanted, changed, make_reading, mapped
from spartito.data.reading.stream_checksum import stream_checksum
from spartito.data.source import BatchStream, ExampleStream, Found, InputContext, PerWorker
from spartito.errors import CorruptSampleError, UserError
from spartito.notes import warn

Task = Callable[[], Batch]

SPARE = 2  # rows of a batch's `spare`: fewer cannot be normalized over
_END = object()


class Feed(Protocol):
    """One pass over a source for one replica, as tasks that each make one batch."""

    def tasks(self, epoch: int, start: int) -> Iterator[Task]:
        """The batches of pass ``epoch`` from step ``start`` on."""
        ...


def check_divides(dataset: Dataset, replicas: int) -> None:
    """Refuse batches of which some replicas would never train with a row.

    Args:
        dataset: Whose global batches are divided.
        replicas: Among so many.
    """
    if dataset.batch_size is not None and dataset.batch_size < replicas:
        raise UserError(
            f"a global batch of {dataset.batch_size} for {replicas} replicas",
            "The global batch is divided among the replicas: each needs at least one example.",
        )


class Loader:
    """Iterates over one epoch of a data set at a time; the next iteration is the next epoch.

    Reads the data shard ``shard`` of each global batch. ``seed`` shuffles where the data set has
    no seed of its own. `state_dict` returns the position after the last batch that was given out,
    wherever the reading ahead is; `load_state_dict` goes there. Batches are made ready for where
    they are to be placed; small ones are there already, for which one copy is enough.
    """

    def __init__(
        self,
        dataset: Dataset,
        shard: DataShard = (0, 1),
        seed: int = 0,
        placing: Placing = HOST,
    ) -> None:
        if dataset.examples == 0:
            raise UserError("the data set has no examples")
        if dataset.steps_per_pass == 0:
            raise UserError(
                f"{dataset.examples} examples are fewer than one batch of {dataset.batch_size}",
                "Choose a smaller batch, or keep the remainder.",
            )
        self.dataset = dataset
        self._feed = make_feed(dataset, shard, seed, placing=placing)
        self._placing = placing
        self._pass = 0
        self._step = 0

    def __iter__(self) -> Iterator[Batch]:
        """From the present position to the end of the epoch (of the passes that it has)."""
        while True:
            fresh = self._step == 0
            yield from self.rest_of_pass()
            if fresh and self._step == 0:
                raise self.nothing()
            self.next_pass()
            if self.begins_epoch:
                return

    def nothing(self) -> UserError:
        """What to raise when a pass had no batch at all."""
        given = used_up(self.dataset)
        if given is None:
            return UserError("the data set has no examples")
        return UserError(
            f"the {type(given).__name__} that was given as data is used up: nothing for pass "
            f"{self._pass + 1}",
            "Give what can be iterated again: arrays, a DataLoader (of a list of batches: "
            "DataLoader(batches, batch_size=None)), an object with __iter__, or "
            "sp.data.per_worker(function).",
        )

    @property
    def begins_epoch(self) -> bool:
        """Whether the present pass is the first one of an epoch."""
        repeats = self.dataset.repeats
        return repeats is not None and self._pass % repeats == 0

    def next_pass(self) -> None:
        """Go to the beginning of the next pass."""
        self._pass, self._step = self._pass + 1, 0

    def endless(self) -> Iterator[Batch]:
        """From the present position on, pass after pass."""
        while True:
            yield from self

    def state_dict(self) -> dict[str, int]:
        """The position of the next batch: pass and step."""
        return {"pass": self._pass, "step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position that `state_dict` returned, under any number of replicas."""
        self._pass, self._step = state["pass"], state["step"]

    def rest_of_pass(self) -> Iterator[Batch]:
        """From the present position to the end of the pass, and no further."""
        tasks = self._feed.tasks(self._pass, self._step)
        if self._placing.pins:
            tasks = map(partial(partial, self._ready), tasks)
        batches = read_ahead(tasks, self.dataset.ahead, self.dataset.threads)
        try:
            for batch in batches:
                self._step = batch.step + 1
                yield batch
        finally:
            batches.close()

    def _ready(self, task: Task) -> Batch:
        batch = task()
        return structs.replace(batch, data=self._placing.ready(batch.data))


def used_up(dataset: Dataset) -> Iterator[Any] | None:
    """The generator or other iterator below a data set, which can be read only once."""
    source = dataset.source
    given = source.batches if isinstance(source, BatchStream) else None
    given = source.examples if isinstance(source, ExampleStream) else given
    return given if isinstance(given, Iterator) else None


def examples(dataset: Dataset) -> Iterator[Any]:
    """One epoch of a data set without batches, on one replica; corrupt examples are left out."""
    source = dataset.source
    feed = None if isinstance(source, ExampleStream) else IndexedFeed(dataset, (0, 1), 0)
    for epoch in count() if dataset.repeats is None else range(dataset.repeats):
        if feed is not None:
            yield from feed.examples(epoch)
        elif isinstance(source, ExampleStream):
            source.begin(epoch)
            for index, example in enumerate(source.examples):
                yield changed(dataset.example_maps, example, 0, epoch, index)


def make_feed(
    dataset: Dataset,
    shard: DataShard,
    seed: int,
    member: DataShard = (0, 1),
    placing: Placing = HOST,
) -> Feed:
    """What makes the batches of a data shard out of a data set's source.

    ``member`` is the part of the shard that is read, where several read it together; ``placing``
    is for batches that are cheaper to move together.
    """
    if isinstance(dataset.source, PerWorker):
        return PerWorkerFeed(dataset, dataset.source, shard)
    if isinstance(dataset.source, ExampleStream | BatchStream):
        return StreamFeed(dataset, shard, seed, member)
    if not dataset.batched:
        raise UserError("a data set without batches", "Call .batch(size) at its end.")
    return IndexedFeed(dataset, shard, seed, None, member, placing)


class _Part(msgspec.Struct, frozen=True):
    """This replica's ``rows`` of a global batch of ``size``: what it reads, and their offsets."""

    epoch: int
    step: int
    size: int
    rows: int
    offsets: Tensor
    indices: slice | Tensor
    drawn: int

    @property
    def wanted(self) -> Wanted:
        """The examples as numbers."""
        found = self.indices
        if isinstance(found, slice):
            return self.epoch, range(found.start, found.stop)
        return self.epoch, found.tolist()


class IndexedFeed:
    """Examples by index: the order is made first, then only this data shard is read."""

    def __init__(
        self,
        dataset: Dataset,
        shard: DataShard,
        seed: int,
        passes: Passes | None = None,
        member: DataShard = (0, 1),
        placing: Placing = HOST,
    ) -> None:
        """``passes`` are given where feeds read short ranges of them in turn: processes last.

        ``member`` and ``placing`` are as for `make_feed`.
        """
        self._dataset = dataset
        self._shard, self._member = shard, member
        self._placing = HOST if dataset.batch_maps else placing  # they get what is in memory
        self._seed = seed if dataset.seed is None else dataset.seed
        self._passes = passes or Passes(dataset, self._seed)
        self._lasting = passes is not None
        source: Any = dataset.source
        self._source, self._count = source, len(source)
        self._reading = make_reading(dataset, self._seed)
        self._processes: Processes | None = None
        self._rows: dict[int, tuple[slice | None, Tensor, int]] = {}
        self._skipped: set[int] = set()
        self._sample: Any = None
        self._sample_size = 0
        limit = dataset.corrupt_limit
        self._limit = max(10, self._count // 100) if limit is None else limit

    def tasks(self, epoch: int, start: int) -> Iterator[Task]:
        """As `Feed.tasks`."""
        parts = self._parts(epoch, start)
        if self._dataset.gathers:
            together = isinstance(self._source, Arrays) and not self._dataset.ahead
            return self._several(parts) if together else map(partial(partial, self._gather), parts)
        if self._dataset.processes is None:
            return map(partial(partial, self._read), parts)
        if self._processes is None:
            self._processes = Processes(self._dataset.processes, self._reading, self._lasting)
        made, asked = tee(parts)
        found = self._processes.read(part.wanted for part in asked)
        return (partial(self._made, *pair) for pair in zip(made, found, strict=True))

    def examples(self, epoch: int) -> Iterator[Any]:
        """The examples of pass ``epoch``, one after the other."""
        order = order_of(self._dataset, self._seed, epoch)
        for index in range(self._count) if order is None else order.tolist():
            try:
                example = self._reading.one(epoch, index)
            except CorruptSampleError as error:
                self._skip(index, str(error))
            else:
                yield example

    def _parts(self, epoch: int, start: int) -> Iterator[_Part]:
        found = self._passes.of(epoch)
        checksum = found.checksum
        for step in range(start, len(found)):
            size = found.size(step)
            rows, offsets, count = self._rows.get(size) or self._rows_of(size)
            indices = found.indices(step, offsets if rows is None else rows)
            yield _Part(epoch, step, size, count, offsets, indices, checksum)

    def _rows_of(self, size: int) -> tuple[slice | None, Tensor, int]:
        """This replica's rows of a global batch of ``size``, also as a slice if it has them all."""
        span = self._dataset.rows(size, self._shard, self._member)
        rows = slice(span.start, span.stop) if span.stop <= size else None
        offsets = torch.arange(span.start, span.stop).clamp(max=size - 1)
        known = self._rows[size] = rows, offsets, len(span)
        return known

    def _gather(self, part: _Part) -> Batch:
        return self._batch(part, self._source.gather(part.indices), part.offsets, part.rows)

    def _several(self, parts: Iterator[_Part]) -> Iterator[Task]:
        """Small batches are read several at once: each by itself takes 5% of a small step."""
        for first in parts:
            count = self._source.at_once(first.rows)
            group = [first, *islice(parts, count - 1)]
            if count == 1:
                yield partial(self._gather, first)
                continue
            found = self._source.gather_each([part.indices for part in group], self._placing)
            for part, data in zip(group, found, strict=True):
                yield partial(self._batch, part, data, part.offsets, part.rows)

    def _read(self, part: _Part) -> Batch:
        return self._made(part, self._reading.many(part.wanted))

    def _made(self, part: _Part, found: Found) -> Batch:
        self._note(found)
        if found.data is None:
            return self._batch(part, self._empty(part.epoch), part.offsets[:0], 0)
        count = len(found.kept)
        offsets = part.offsets if count == part.rows else part.offsets[found.kept]
        batch = self._batch(part, found.data, offsets, count)
        left_out = part.rows - count - len(found.corrupt)
        return _without(batch, left_out) if left_out else batch

    def _batch(self, part: _Part, data: Any, offsets: Tensor, rows: int) -> Batch:
        maps = self._dataset.batch_maps
        data = mapped(maps, data) if maps else data
        spare = None if rows else mapped(maps, self._some(part.epoch))
        made = Batch(data, rows, part.size, offsets, part.epoch, part.step, part.drawn, spare)
        return _counted(made) if maps else made

    def _some(self, epoch: int) -> Any:
        """A few rows, whichever."""
        if self._dataset.gathers:
            return self._source.gather(slice(0, SPARE))
        self._empty(epoch)
        return rows(self._sample, Tensor.clone)

    def _note(self, found: Found) -> None:
        """Remember what batches look like, and which examples cannot be read."""
        for index, message in found.corrupt:
            self._skip(index, message)
        count = len(found.kept)
        if found.data is None or self._sample_size >= min(SPARE, count):
            return
        sample = head(found.data, SPARE, count)
        if sample is None and count <= SPARE:
            sample = rows(found.data, Tensor.clone)
        if sample is not None:
            self._sample, self._sample_size = sample, min(SPARE, count)

    def _empty(self, epoch: int) -> Any:
        """A batch without rows, shaped like one that has some."""
        for index in range(0, self._count, SPARE):
            if self._sample is not None:
                break
            self._note(self._reading.many((epoch, range(index, min(index + SPARE, self._count)))))
        if self._sample is None:
            raise UserError("not one example of the data set can be read")
        return without_rows(self._sample, self._sample_size)

    def _skip(self, index: int, message: str) -> None:
        if index in self._skipped:
            return
        self._skipped.add(index)
        if len(self._skipped) > self._limit:
            raise UserError(
                f"{len(self._skipped)} examples cannot be read, the last: {message}",
                f"Up to {self._limit} are skipped. `spartito data check` finds them all, "
                "in folders of images and in packed files.",
            )
        warn("skipped (%d so far): %s", len(self._skipped), message)


def _counted(batch: Batch) -> Batch:
    """``batch`` after functions of the user's, which may have left out some of its examples."""
    kept = kept_rows(batch.data, batch.size)
    if kept == batch.size:
        return batch
    made = structs.replace(batch, size=kept, offsets=batch.offsets[:kept])
    return _without(made, batch.size - kept)


def _without(batch: Batch, left_out: int) -> Batch:
    return structs.replace(batch, left_out=batch.left_out + left_out)


class StreamFeed:
    """A stream that every replica reads whole and in the same order; each keeps its data shard."""

    def __init__(
        self, dataset: Dataset, shard: DataShard, seed: int, member: DataShard = (0, 1)
    ) -> None:
        self._dataset, self._shard, self._seed, self._member = dataset, shard, seed, member

    def tasks(self, epoch: int, start: int) -> Iterator[Task]:
        """As `Feed.tasks`; resuming reads past what was seen before."""
        draws, batches, drawn = Draws(self._seed, epoch), self._batches(epoch), 0
        for step in count():
            with draws:
                data = next(batches, _END)
            if data is _END:
                return
            if step == 0:  # who reads other examples is found by it
                drawn = stream_checksum(data)
            if step >= start:
                yield partial(self._batch, epoch, step, data, drawn)

    def _batches(self, epoch: int) -> Iterator[Any]:
        source, size = self._dataset.source, self._dataset.batch_size
        assert isinstance(source, ExampleStream | BatchStream)
        source.begin(epoch)
        if isinstance(source, BatchStream):
            for batch in source.batches:
                yield tidy(batch)
            return
        assert size is not None
        examples = enumerate(source.examples)
        while group := list(islice(examples, size)):
            if len(group) == size or not self._dataset.drop_remainder:
                maps = self._dataset.example_maps
                yield self._dataset.collate(
                    [changed(maps, found, self._seed, epoch, index) for index, found in group]
                )

    def _batch(self, epoch: int, step: int, data: Any, drawn: int) -> Batch:
        size = count_rows(data)
        span = self._dataset.rows(size, self._shard, self._member)
        offsets = torch.arange(span.start, span.stop).clamp(max=size - 1)
        mine = mapped(self._dataset.batch_maps, self._mine(data, offsets))
        batch = Batch(mine, len(span), size, offsets, epoch, step, drawn)
        if len(span):
            return _counted(batch) if self._dataset.batch_maps else batch
        spare = mapped(self._dataset.batch_maps, head(data, SPARE))
        return structs.replace(batch, spare=spare)

    def _mine(self, data: Any, offsets: Tensor) -> Any:
        """The examples at ``offsets`` of a whole batch."""
        shape = form(data)
        assert shape is not None  # its rows were counted
        mine = part_of(data, offsets, shape)
        if mine is not None:
            return mine
        if self._shard[1] * self._member[1] > 1:
            raise UserError(
                "a stream gave a batch that cannot be divided among replicas: its tensors and "
                f"lists have {', '.join(map(str, sizes(data)))} rows",
                "Give tensors of (examples, ...), or a DataLoader over examples by index, of "
                "which each replica makes its own batch, or sp.data.per_worker(function).",
            )
        return data


class PerWorkerFeed:
    """Local batches of the user's own making."""

    def __init__(self, dataset: Dataset, source: PerWorker, shard: DataShard) -> None:
        self._dataset, self._source, self._shard = dataset, source, shard

    def tasks(self, epoch: int, start: int) -> Iterator[Task]:
        """As `Feed.tasks`; resuming reads past what was seen before."""
        context = InputContext(self._shard, epoch)
        for step, data in enumerate(islice(self._source.function(context), start, None), start):
            yield partial(self._batch, epoch, step, data)

    def _batch(self, epoch: int, step: int, data: Any) -> Batch:
        data = mapped(self._dataset.batch_maps, tidy(data))
        size = count_rows(data)
        index, count = self._shard
        offsets = torch.arange(index * size, (index + 1) * size)
        return Batch(data, size, size * count, offsets, epoch, step)
