"""Examples by index into a batch: in a thread of this process, or in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from threading import Lock
from typing import Any

import torch
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, get_worker_info

from spartito.data.dataset import Dataset, Transform
from spartito.data.images.transforms import RandomTransform
from spartito.data.reading.collate import collate, kept_rows, tidy
from spartito.data.reading.order import example_generator
from spartito.data.source import BatchSource, Found
from spartito.errors import CorruptSampleError, SpartitoError, UserError

Wanted = tuple[int, Sequence[int]]
"""A pass, and the indices of examples."""

_ONE_AT_A_TIME = Lock()
"""Held while a data set of the user reads an example: the thread that reads ahead for training
and the one that evaluates may have the same open file below them. Forked processes never use it."""


@dataclass(frozen=True)
class Reading:
    """How an example is read and changed, and how several become a batch."""

    source: Any
    maps: tuple[Transform, ...]
    collate: Callable[[list[Any]], Any]
    seed: int
    alone: bool  # one example at a time in this process

    def one(self, epoch: int, index: int) -> Any:
        """The example ``index`` as it is in pass ``epoch``."""
        return changed(self.maps, self._read(index), self.seed, epoch, index)

    def _read(self, index: int) -> Any:
        try:
            with _ONE_AT_A_TIME if self.alone else nullcontext():
                return self.source[index]
        except SpartitoError:
            raise
        except Exception as error:
            error.add_note(
                f"This was example {index} of {type(self.source).__name__}. To leave out examples "
                "that cannot be read, raise spartito.CorruptSampleError in __getitem__; "
                ".skip_corrupt(n) says how many may be."
            )
            raise

    def _several(self, indices: Sequence[int]) -> Sequence[Any] | None:
        """Examples that a data set reads together, as torch asks for them; None: it does not."""
        read = getattr(self.source, "__getitems__", None)
        if not callable(read):
            return None
        try:
            with _ONE_AT_A_TIME if self.alone else nullcontext():
                found = read(list(indices))
        except Exception:
            return None  # one by one it is known which of them it is
        return found if isinstance(found, Sequence) and len(found) == len(indices) else None

    def many(self, wanted: Wanted) -> Found:
        """The examples that are wanted as a batch, without those that cannot be read."""
        epoch, indices = wanted
        source = self.source
        if isinstance(source, BatchSource) and not self.maps and self.collate is source.collate:
            return source.read_batch(indices)
        read = self._several(indices)
        examples, kept, corrupt = [], [], []
        for position, index in enumerate(indices):
            try:
                example = self._read(index) if read is None else read[position]
                examples.append(changed(self.maps, example, self.seed, epoch, index))
            except CorruptSampleError as error:
                corrupt.append((index, str(error)))
            else:
                kept.append(position)
        if not examples:
            return Found(None, kept, corrupt)
        data = tidy(self.collate(examples))
        if self.collate is not collate and not _has(data, examples[0]):
            kept = kept[: kept_rows(data, len(kept))]  # nobody knows which it has left out
        return Found(data, kept, corrupt)


def _has(data: Any, example: Any) -> bool:
    """Whether examples lie in a batch as they are."""
    return isinstance(data, tuple) and any(part is example for part in data)


def make_reading(dataset: Dataset, seed: int) -> Reading:
    """How the examples of ``dataset`` are read."""
    alone = dataset.processes is None and dataset.threads == 1
    return Reading(dataset.source, dataset.example_maps, dataset.collate, seed, alone)


def changed(maps: tuple[Transform, ...], example: Any, seed: int, epoch: int, index: int) -> Any:
    """``example`` after all that happens to it; what is random depends on its index alone."""
    generator = None
    for change in maps:
        if isinstance(change, RandomTransform):
            generator = generator or example_generator(seed, epoch, index)
            example = change.apply(example, generator)
        else:
            example = mapped((change,), example)
    return example


def mapped(functions: tuple[Callable[..., Any], ...], data: Any) -> Any:
    """``data`` after ``functions``: a tuple arrives as separate arguments."""
    for function in functions:
        data = function(*data) if isinstance(data, tuple) else function(data)
    return dict(data) if functions and isinstance(data, Mapping) else data


class Processes:
    """Worker processes of torch's `DataLoader`, with all that the user's own loader asked for.

    Examples are read in them as there: in copies of the data set, after ``worker_init_fn``.
    """

    def __init__(self, like: DataLoader[Any], reading: Reading, lasting: bool) -> None:
        """``lasting`` keeps the processes from one call of `read` to the next in any case."""
        self._wanted, self._seed = _Wanted(), reading.seed
        # Else torch draws the processes' seed from the generator from which the model draws.
        self._generator = torch.Generator() if like.generator is None else None
        self._loader: DataLoader[Found | UserError] = DataLoader(
            _Batches(reading),
            batch_sampler=self._wanted,  # type: ignore[arg-type]
            collate_fn=_as_it_is,
            num_workers=like.num_workers,
            pin_memory=like.pin_memory,
            timeout=like.timeout,
            worker_init_fn=_Begin(like.worker_init_fn),
            multiprocessing_context=like.multiprocessing_context,
            generator=self._generator or like.generator,
            prefetch_factor=like.prefetch_factor,
            persistent_workers=lasting or like.persistent_workers,
        )

    def read(self, wanted: Iterable[Wanted]) -> Iterator[Found]:
        """What `Reading.many` finds for each of ``wanted``, in their order, read ahead."""
        wanted = iter(wanted)
        first = list(islice(wanted, 1))
        if self._generator is not None and first:
            epoch, indices = first[0]
            drawn = example_generator(self._seed, epoch, next(iter(indices), 0)).integers(2**63)
            self._generator.manual_seed(int(drawn))
        self._wanted.now = chain(first, wanted)
        for found in self._loader:
            if isinstance(found, UserError):
                raise found
            yield found


class _Wanted:
    """What the processes are to read next."""

    now: Iterable[Wanted] = ()

    def __iter__(self) -> Iterator[Wanted]:
        return iter(self.now)


@dataclass(frozen=True)
class _Begin:
    """How a process begins: as if its data set were the user's own, not ours around it."""

    given: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.reading.source)  # it refuses to be set
        if self.given is not None:
            self.given(worker)


class _Batches(torch_data.Dataset[Any]):
    """A data set of torch's whose examples are whole batches of ours."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def __getitems__(self, wanted: Wanted) -> Found | UserError:
        try:
            return self.reading.many(wanted)
        except UserError as error:  # torch would put a traceback into its message
            return error

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError("whole batches are read")


def _as_it_is(found: Any) -> Any:
    return found
