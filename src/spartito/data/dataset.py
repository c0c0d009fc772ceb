"""A data set as a dataset of what is to be done; nothing is read before somebody iterates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from spartito.data.batch import Batch
from spartito.data.images.transforms import RandomTransform
from spartito.data.memory import Arrays
from spartito.data.reading.collate import collate
from spartito.data.reading.order import DataShard, Lengths, group_rows, part_rows, shard_rows, steps
from spartito.data.reading.prefetch import reading_threads
from spartito.data.sets.hugging_face import (
    TableSource,
    check_one_split,
    collate_rows,
    is_stream,
    is_table,
)
from spartito.data.source import (
    BatchStream,
    BlockSource,
    Described,
    ExampleStream,
    GatherSource,
    OrderedSource,
    PerWorker,
    Source,
)
from spartito.errors import UserError
from spartito.notes import warn
from spartito.numeric import is_whole

Transform = Callable[..., Any] | RandomTransform
Origin = Source | ExampleStream | BatchStream | PerWorker


@dataclass(frozen=True)
class Dataset:
    """A source of examples and the operations on them; nothing is read before iteration.

    Every method returns a new data set. The order of calls matters for `map` only: before
    `batch` it works on examples, after it on local batches.

    Attributes:
        source: Where the examples come from.
        example_maps: What is applied to each example, in this order.
        batch_maps: What is applied to each local batch, in this order.
        batch_size: Examples in a global batch; None before `batch`.
        drop_remainder: Whether a last batch that is smaller is left out.
        shuffled: Whether each pass has an order of its own.
        lengths: Of each example, where those of like length come in one batch.
        live: Blocks among which examples are shuffled, where they lie in blocks; None: all.
        seed: What the order is drawn from; None takes the trainer's.
        repeats: Passes in an epoch; None is endless and needs ``steps_per_epoch``.
        ahead: Batches that are read ahead in the background.
        threads: Threads that do so.
        corrupt_limit: Unreadable examples that a replica may skip; None is 1 % (10 at least).
        padded: Whether the last batch is filled by repeating its last example, so that every
            replica has as many rows (for predictions).
        collate: Makes a batch of a list of examples.
        classes: Names of the labels, where they are known.
        batch_sampler: Draws the indices of each global batch, in place of shuffle and batch.
        processes: A torch loader whose worker processes read the examples.
        least: The fewest rows that a replica with rows gets of a whole batch.
        groups: The data shards of each group that trains apart from the others; a batch is cut
            among groups first.
    """

    source: Origin
    example_maps: tuple[Transform, ...] = ()
    batch_maps: tuple[Callable[..., Any], ...] = ()
    batch_size: int | None = None
    drop_remainder: bool = False
    shuffled: bool = False
    lengths: Lengths | None = field(default=None, repr=False)
    live: int | None = None
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
    groups: tuple[tuple[int, ...], ...] = ()

    def map(self, function: Transform) -> Dataset:
        """Change every example (before ``.batch``) or every local batch (after it).

        Args:
            function: Gets a tuple as separate arguments, ``function(x, y)``, and anything else as
                one. A `RandomTransform` gets an example and a generator that is seeded by
                (seed, epoch, index).

        Returns:
            A new data set.

        Raises:
            UserError: No function, or a random transform of whole batches.
        """
        if not callable(function) and not isinstance(function, RandomTransform):
            raise UserError(f"map({function!r})", "Give a function.")
        if self.batched or isinstance(self.source, BatchStream | PerWorker):
            if isinstance(function, RandomTransform):
                raise UserError(
                    f"{function} of a whole batch",
                    "A random transform changes single examples: put it before .batch.",
                )
            return replace(self, batch_maps=(*self.batch_maps, function))
        return replace(self, example_maps=(*self.example_maps, function))

    def shuffle(
        self,
        seed: int | None = None,
        blocks: int | Literal["all"] | None = None,
        lengths: Any = None,
    ) -> Dataset:
        """Permute all examples, anew in each pass.

        Args:
            seed: What the order is drawn from, with the number of the pass; None takes the
                trainer's.
            blocks: For examples that lie in blocks (`packed`): how many of these are in use at a
                time. Blocks are permuted, and an example goes to a position that is drawn from a
                stretch of so many blocks. "all" permutes everything, which keeps all blocks in
                memory.
            lengths: One number for each example, as of its tokens: a batch then has examples of
                like length, so that little of it is filled up. Batches come in a drawn order.

        Returns:
            A new data set.

        Raises:
            UserError: The data comes in an order of its own: a stream, or a sampler's.
        """
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
        if isinstance(self.source, OrderedSource):
            raise UserError(
                f"shuffle() of a {type(self.source).__name__}, which has an order of its own",
                "It is drawn anew in each pass. Shuffle the data sets before they are mixed.",
            )
        if seed is not None and not is_whole(seed):
            raise UserError(f"shuffle(seed={seed!r})", "A whole number, or None.")
        known = None if lengths is None else self._checked(lengths)
        return replace(self, shuffled=True, seed=seed, live=self._live(blocks), lengths=known)

    def _checked(self, lengths: Any) -> Lengths:
        """The lengths of examples, as numbers that can be compared."""
        found = np.asarray(lengths)
        if found.shape != (self.examples,) or found.dtype.kind not in "iuf":
            raise UserError(
                f"shuffle(lengths=...) of {found.shape} {found.dtype} for {self.examples} examples",
                "Give one number for each example.",
            )
        if isinstance(self.source, BlockSource):
            raise UserError(
                f"shuffle(lengths=...) of a {type(self.source).__name__}, which lies in blocks",
                "Leave lengths out, or read the examples into memory first.",
            )
        return found.astype(np.float64)

    def _live(self, blocks: int | Literal["all"] | None) -> int | None:
        if not isinstance(self.source, BlockSource):
            if blocks is not None:
                raise UserError(
                    f"shuffle(blocks={blocks!r}) of a {type(self.source).__name__}, which has no "
                    "blocks",
                    "Leave it out: everything is permuted.",
                )
            return None
        count = len(self.source.edges) - 1
        if blocks is None:
            raise UserError(
                f"shuffle() of examples that lie in {count} blocks",
                'Say among how many an example is moved: shuffle(blocks=16). "all" permutes '
                "everything, and keeps all blocks in memory.",
            )
        if blocks == "all":
            return count
        if not is_whole(blocks) or blocks < 1:
            raise UserError(f"shuffle(blocks={blocks!r})", 'A number of at least 1, or "all".')
        return blocks

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Group examples into global batches, of which each replica gets one data shard.

        Args:
            batch_size: Examples in a global batch.
            drop_remainder: Leave out a last batch that is smaller.

        Returns:
            A new data set.

        Raises:
            UserError: A size below 1, or the data has batches already.
        """
        if not is_whole(batch_size) or batch_size < 1:
            raise UserError(
                f"a batch size of {batch_size!r}", "It is a whole number of 1 or more: 32."
            )
        if self.batched or isinstance(self.source, BatchStream | PerWorker):
            raise UserError(f"batch({batch_size}) of batches", "Batch once, after .map/.shuffle.")
        return replace(self, batch_size=batch_size, drop_remainder=drop_remainder)

    def repeat(self, count: int | None = None) -> Dataset:
        """Pass over the examples several times in an epoch.

        Args:
            count: Passes; None is without end, and ``fit`` then needs ``steps_per_epoch``.

        Returns:
            A new data set.

        Raises:
            UserError: A count below 1.
        """
        if count is not None and (not is_whole(count) or count < 1):
            raise UserError(f"repeat({count!r})", "Repeat at least once, or without a count.")
        return replace(self, repeats=count)

    def prefetch(self, batches: int = 2, threads: int | None = None) -> Dataset:
        """Read batches ahead in background threads while the device computes.

        Args:
            batches: How many at most; 0 reads nothing ahead.
            threads: How many threads read; None is 1. With several the data set must allow that
                they read at the same time.

        Returns:
            A new data set.

        Raises:
            UserError: A negative number of batches.
        """
        if not is_whole(batches) or batches < 0:
            raise UserError(f"prefetch({batches!r})", "Give the number of batches, 0 for none.")
        return replace(self, ahead=batches, threads=max(1, threads or self.threads))

    def skip_corrupt(self, limit: int) -> Dataset:
        """Let each replica skip unreadable examples.

        Args:
            limit: How many at most; one more is an error. Without this call 1 %, at least 10.

        Returns:
            A new data set.

        Raises:
            UserError: It is no number of examples.
        """
        if not is_whole(limit) or limit < 0:
            raise UserError(f"skip_corrupt({limit!r})", "Give a number of examples, 0 for none.")
        return replace(self, corrupt_limit=limit)

    def describe(self) -> str:
        """What is read from where, and in which order.

        Returns:
            Some lines for people.
        """
        source = self.source
        name = type(source).__name__
        count = "a stream" if self.examples is None else f"{self.examples:,} examples"
        read = source.describe() if isinstance(source, Described) else f"{name}: {count}"
        if isinstance(source, OrderedSource):
            order = "drawn in each pass"
        elif not self.shuffled:
            order = "as they lie" if self.batch_sampler is None else "as a sampler draws"
        elif self.live is None or not isinstance(source, BlockSource):
            order = "all permuted in each pass"
        else:
            blocks = min(self.live, len(source.edges) - 1)
            order = f"blocks permuted in each pass, examples moved among {blocks} of them"
        size = "" if self.batch_size is None else f"; batches of {self.batch_size}"
        return f"{read}\norder: {order}{size}"

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
            return known_length(self.batch_sampler)
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

    def rows(self, size: int, shard: DataShard, member: DataShard = (0, 1)) -> range:
        """The rows of a global batch that a data shard has.

        A batch smaller than the others is not cut into single rows: what normalizes over a batch
        cannot use them, and the time for them is short. Offsets of a padded one go past its end.

        Args:
            size: Examples in the global batch.
            shard: The index of the data shard, and how many there are.
            member: The same of a part of it, where several read it together.

        Returns:
            Their offsets in the global batch.
        """
        if self.padded:
            return shard_rows(-(-size // shard[1]) * shard[1], shard)
        is_rest = self.batch_size is not None and size < self.batch_size
        least = 2 if is_rest else self.least
        if self.groups:
            return group_rows(size, shard[0], self.groups, least)
        return part_rows(shard_rows(size, shard, least), member, least)

    def __len__(self) -> int:
        count = self.steps_per_epoch if self.batched else self.examples
        if count is None:
            raise TypeError("this data set has no known length")
        return count

    def __iter__(self) -> Iterator[Any]:
        """One epoch on one replica: its batches, or its examples before ``.batch``."""
        from spartito.data.reading.loader import Loader, examples  # which read data sets

        if self.batched or isinstance(self.source, BatchStream | PerWorker):
            for batch in Loader(self):
                yield batch.data
        else:
            yield from examples(self)


def arrays(x: Any = None, y: Any = None, *more: Any) -> Dataset:
    """Arrays or tensors in memory, one row per example; dtypes stay as they are.

    Batches are copies, small ones of several steps (up to 16, or 1 MiB) at once: what is written
    into the arrays while they are read comes up to so many steps later.

    Args:
        x: The inputs: an array or tensor, or a tuple or dict of them.
        y: The targets.
        more: Further parts of each example.

    Returns:
        A data set of tuples ``(x, y, ...)``, or of ``x`` where nothing else is given.

    Raises:
        UserError: The numbers of rows differ.
    """
    if y is None and any(part is not None for part in more):
        raise UserError(
            "arrays with further parts and no y", "The second part is the target: (x, y, weights)."
        )
    return Dataset(Arrays(*(part for part in (x, y, *more) if part is not None)))


def per_worker(function: Callable[..., Iterable[Any]]) -> Dataset:
    """Local batches that every replica makes itself, for sources that do not fit one machine.

    Order and resuming are what the function makes of them; replicas may have unequal numbers
    of batches, the epoch ends when all have ended.

    Args:
        function: Gets an `InputContext` and returns an iterable of local batches.

    Returns:
        A data set that has batches already.
    """
    return Dataset(PerWorker(function))


def as_dataset(data: Any, batch_size: int | None = 32) -> Dataset:
    """Anything that users bring, as a data set with batches.

    Args:
        data: A `Dataset`; a torch ``DataLoader`` (its batch size is taken as global, its collate
            function and worker processes are kept, plain shuffling becomes ours; any other
            sampler draws the global batches, the same ones on every replica); a ``Dataset`` or
            ``IterableDataset`` of torch or of Hugging Face's ``datasets``; a tensor or array, a
            tuple ``(x, y)`` or a dict of them; an iterable of batches.
        batch_size: The global batch size where the data brings none; None leaves it without
            batches, so that ``.map`` changes examples.

    Returns:
        The data set; ``data`` itself if it is one with batches.

    Raises:
        UserError: No data in any of these forms.
    """
    check_one_split(data)
    if isinstance(data, Dataset):
        dataset = data
    elif is_table(data):
        dataset = _from_table(data)
    elif is_stream(data):
        dataset = replace(Dataset(ExampleStream(data)), collate=collate_rows)
    elif isinstance(data, DataLoader):
        dataset = _from_loader(data)
    elif isinstance(data, tuple | Mapping | torch.Tensor) or hasattr(data, "__array__"):
        dataset = arrays(*data) if isinstance(data, tuple) else arrays(data)
    elif isinstance(data, IterableDataset):
        dataset = Dataset(ExampleStream(data))
    elif isinstance(data, Source) and not isinstance(data, str | bytes):
        if isinstance(data, list) and data and (_has_rows(data[0]) or _is_x_and_y(data)):
            warn(
                "a list is taken as examples, here %d; if they are batches, give "
                "DataLoader(batches, batch_size=None), if they are x and y, a tuple (x, y)",
                len(data),
            )
        dataset = Dataset(data)
    elif isinstance(data, Iterable) and not isinstance(data, str | bytes | Batch):
        dataset = Dataset(BatchStream(data))
    else:
        raise UserError(
            f"{type(data).__name__} is no data",
            "Give arrays (x, y), a torch Dataset or DataLoader, or one of spartito.data.",
        )
    if batch_size is None or dataset.batched or isinstance(dataset.source, BatchStream | PerWorker):
        return dataset
    return dataset.batch(batch_size)


def _has_rows(item: Any) -> bool:
    """Whether all parts of an item begin with the same number of rows, as those of a batch do."""
    parts = item.values() if isinstance(item, Mapping) else item
    if not isinstance(item, Mapping | tuple | list) or len(parts) < 2:
        return False
    heads = {tuple(getattr(part, "shape", ()))[:1] for part in parts}
    return len(heads) == 1 and () not in heads and heads != {(1,)}


def _is_x_and_y(data: list[Any]) -> bool:
    """Whether a list may be arrays with a row per example, as Keras takes them."""
    return len(data) <= 3 and _has_rows(data) and len(data[0]) > len(data)


def _from_table(table: Any) -> Dataset:
    source = TableSource(table)
    dataset = replace(Dataset(source), collate=source.collate)
    # A function of the user's may not bear several threads.
    threads = 1 if source.format == "custom" else reading_threads()
    return dataset.prefetch(threads + 2, threads)


def _from_loader(loader: DataLoader[Any]) -> Dataset:
    batches: Any = loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise UserError(
            f"a DataLoader with a DistributedSampler for {sampler.num_replicas} replicas",
            "Spartito deals out the examples itself: leave the sampler out, and say shuffle=True.",
        )
    source: Any = loader.dataset
    check_one_split(source)
    overridden = type(loader).__iter__ is not DataLoader.__iter__
    if isinstance(source, IterableDataset) or batches is None or overridden:
        return Dataset(BatchStream(loader))
    processes = loader if loader.num_workers else None
    dataset = replace(Dataset(source), collate=loader.collate_fn, processes=processes)
    if type(batches) is not BatchSampler or not _is_plain(sampler, len(source)):
        return replace(dataset, batch_size=loader.batch_size, batch_sampler=batches)
    if isinstance(sampler, RandomSampler):
        dataset = dataset.shuffle()
    return dataset.batch(batches.batch_size, batches.drop_last)


def _is_plain(sampler: Any, count: int) -> bool:
    """Whether a sampler of torch's gives each of ``count`` examples once, in order or shuffled."""
    if type(sampler) is RandomSampler:
        sizes = {len(sampler.data_source), sampler.num_samples}
        return not sampler.replacement and sizes == {count}
    return type(sampler) is SequentialSampler and len(sampler) == count


def known_length(batch_sampler: Any) -> int | None:
    """How many batches it draws in a pass; None where nobody knows before."""
    try:
        return len(batch_sampler) if isinstance(batch_sampler, Sized) else None
    except (TypeError, NotImplementedError):  # of the sampler inside of it
        return None


def describe_sampler(batch_sampler: Any) -> str:
    """The name of the class that decides the order."""
    inner = getattr(batch_sampler, "sampler", None)
    return type(batch_sampler if inner is None else inner).__name__
