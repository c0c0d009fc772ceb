"""A data set as a chain of what is to be done; nothing is read before somebody iterates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from spartito.data.chain import Chain
from spartito.data.loader import Loader, examples
from spartito.data.memory import Arrays
from spartito.data.passes import describe_sampler
from spartito.data.source import BatchStream, ExampleStream, PerWorker, Source
from spartito.data.transforms import RandomTransform
from spartito.errors import UserError


@dataclass(frozen=True)
class Dataset(Chain):
    """A source, and the chain of what happens to its examples. Every step answers a new one.

    ``.map`` before ``.batch`` works on examples, after it on local batches. ``.shuffle``
    permutes everything, anew in each pass. The batch size is global. ``.repeat()`` without a
    count goes on for ever and wants ``steps_per_epoch``.
    """

    def map(self, function: Callable[..., Any] | RandomTransform) -> Dataset:
        """Change every example (before ``.batch``) or every local batch (after it).

        A tuple arrives as separate arguments, ``function(x, y)``; anything else as one. A
        `RandomTransform` gets a generator seeded by (seed, epoch, index) instead.
        """
        if self.batched or isinstance(self.source, BatchStream | PerWorker):
            if isinstance(function, RandomTransform):
                raise UserError(
                    f"{function} of a whole batch",
                    "A random transform changes single examples: put it before .batch.",
                )
            return replace(self, batch_maps=(*self.batch_maps, function))
        return replace(self, example_maps=(*self.example_maps, function))

    def shuffle(self, seed: int | None = None) -> Dataset:
        """Permute all examples, anew in each pass; ``seed`` None takes the trainer's."""
        if self.batch_sampler is not None:
            raise UserError(
                f"shuffle() of what a {describe_sampler(self.batch_sampler)} draws",
                "The sampler decides the order: shuffle there.",
            )
        if not isinstance(self.source, Source):
            raise UserError(
                f"shuffle() of a {type(self.source).__name__}",
                "A stream comes in its own order: shuffle where it is made.",
            )
        return replace(self, shuffled=True, seed=seed)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Group examples into global batches: each replica gets its share of one."""
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UserError(f"batch({batch_size!r})", "A global batch has at least one example.")
        if self.batched or isinstance(self.source, BatchStream | PerWorker):
            raise UserError(f"batch({batch_size}) of batches", "Batch once, after .map/.shuffle.")
        return replace(self, batch_size=batch_size, drop_remainder=drop_remainder)

    def repeat(self, count: int | None = None) -> Dataset:
        """Pass over the examples ``count`` times in an epoch, or without end."""
        if count is not None and count < 1:
            raise UserError(f"repeat({count})", "Repeat at least once, or without a count.")
        return replace(self, repeats=count)

    def prefetch(self, batches: int = 2, threads: int | None = None) -> Dataset:
        """Read up to ``batches`` ahead in background threads while the device computes.

        With several ``threads`` the data set must bear it that these read at the same time.
        """
        if batches < 0:
            raise UserError(f"prefetch({batches})", "Give the number of batches, 0 for none.")
        return replace(self, ahead=batches, threads=max(1, threads or self.threads))

    def skip_corrupt(self, limit: int) -> Dataset:
        """Let each replica skip up to ``limit`` unreadable examples; one more is an error."""
        return replace(self, corrupt_limit=limit)

    def __len__(self) -> int:
        count = self.steps_per_epoch if self.batched else self.examples
        if count is None:
            raise TypeError("this data set has no known length")
        return count

    def __iter__(self) -> Iterator[Any]:
        """One epoch on one replica: its batches, or its examples before ``.batch``."""
        if self.batched or isinstance(self.source, BatchStream | PerWorker):
            for batch in Loader(self):
                yield batch.data
        else:
            yield from examples(self)


def arrays(x: Any = None, y: Any = None, *more: Any) -> Dataset:
    """Arrays or tensors in memory (or tuples or dicts of them), one row per example.

    dtypes stay as they are. Raises `UserError` if the numbers of rows differ.
    """
    return Dataset(Arrays(*(part for part in (x, y, *more) if part is not None)))


def per_worker(function: Callable[..., Iterable[Any]]) -> Dataset:
    """Local batches that every replica makes itself: ``function(context)`` answers an iterable.

    For sources that do not fit one machine. ``context`` has rank, num_replicas and epoch.
    Order and resuming are what the function makes of them; replicas may have unequal numbers
    of batches, the epoch ends when all have ended.
    """
    return Dataset(PerWorker(function))


def as_dataset(data: Any, batch_size: int = 32) -> Dataset:
    """Anything that users bring, as a batched `Dataset`.

    A `Dataset`; a torch ``DataLoader`` (its batch size is taken as global, its collate function
    and worker processes are kept, plain shuffling becomes ours; any other sampler draws the
    global batches, the same ones on every replica); a torch ``Dataset`` or
    ``IterableDataset``; a tensor or array, a tuple ``(x, y)`` or a dict of them.
    ``batch_size`` is used where the data brings none.
    """
    if isinstance(data, Dataset):
        chain = data
    elif isinstance(data, DataLoader):
        chain = _from_loader(data)
    elif isinstance(data, tuple | Mapping | torch.Tensor) or hasattr(data, "__array__"):
        chain = arrays(*data) if isinstance(data, tuple) else arrays(data)
    elif isinstance(data, IterableDataset):
        chain = Dataset(ExampleStream(data))
    elif isinstance(data, Source) and not isinstance(data, str | bytes):
        chain = Dataset(data)
    elif isinstance(data, Iterable) and not isinstance(data, str | bytes):
        chain = Dataset(BatchStream(data))
    else:
        raise UserError(
            f"{type(data).__name__} is no data",
            "Give arrays (x, y), a torch Dataset or DataLoader, or one of spartito.data.",
        )
    if chain.batched or isinstance(chain.source, BatchStream | PerWorker):
        return chain
    return chain.batch(batch_size)


def _from_loader(loader: DataLoader[Any]) -> Dataset:
    batches: Any = loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise UserError(
            f"a DataLoader with a DistributedSampler for {sampler.num_replicas} replicas",
            "Spartito deals out the examples itself: leave the sampler out, and say shuffle=True.",
        )
    source: Any = loader.dataset
    overridden = type(loader).__iter__ is not DataLoader.__iter__
    if isinstance(source, IterableDataset) or batches is None or overridden:
        return Dataset(BatchStream(loader))
    processes = loader if loader.num_workers else None
    chain = replace(Dataset(source), collate=loader.collate_fn, processes=processes)
    if type(batches) is not BatchSampler or not _is_plain(sampler, len(source)):
        return replace(chain, batch_size=loader.batch_size, batch_sampler=batches)
    if isinstance(sampler, RandomSampler):
        chain = chain.shuffle()
    return chain.batch(batches.batch_size, batches.drop_last)


def _is_plain(sampler: Any, count: int) -> bool:
    """Whether a sampler of torch's gives each of ``count`` examples once, in order or shuffled."""
    if type(sampler) is RandomSampler:
        sizes = {len(sampler.data_source), sampler.num_samples}
        return not sampler.replacement and sizes == {count}
    return type(sampler) is SequentialSampler and len(sampler) == count
