"""The chain: what each step changes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from spartito.data.dataset import Dataset, arrays, as_dataset, per_worker
from spartito.data.images.transforms import RandomFlip
from spartito.data.reading.loader import Loader
from spartito.data.source import BatchStream, ExampleStream, PerWorker
from spartito.errors import CorruptSampleError, UserError

X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(x, int(y)) for x, y in zip(X, Y, strict=True)])


def labels(chain: Dataset) -> list[list[int]]:
    return [batch[1].tolist() for batch in chain]


def test_every_method_returns_a_new_data_set() -> None:
    chain = arrays(X, Y)
    longer = chain.shuffle(3).batch(4).repeat(2).prefetch(2).skip_corrupt(1)
    assert (chain.batched, chain.shuffled, chain.repeats) == (False, False, 1)
    assert (longer.batch_size, longer.seed, longer.repeats, longer.ahead) == (4, 3, 2, 2)
    assert (len(chain), len(longer), longer.steps_per_pass) == (10, 6, 3)
    assert len(arrays(X, Y).batch(4, drop_remainder=True)) == 2
    endless = chain.batch(4).repeat()
    assert endless.steps_per_epoch is None
    with pytest.raises(TypeError, match="no known length"):
        len(endless)
    with pytest.raises(TypeError, match="no known length"):
        len(Dataset(ExampleStream([])))


def test_batches_and_maps() -> None:
    chain = arrays(X, Y).map(lambda x, y: (x + 1, y)).batch(4).map(lambda x, y: (x * 2, -y))
    batches = list(chain)
    assert [len(y) for _, y in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([x for x, _ in batches]), (X + 1) * 2)
    assert torch.equal(torch.cat([y for _, y in batches]), -Y)
    assert [batch.tolist() for batch in arrays(Y).map(lambda y: y + 1).batch(5)] == [
        [1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10],
    ]
    named = arrays({"a": Y}).map(lambda row: {"b": row["a"] * 2}).batch(10)
    assert next(iter(named))["b"].tolist() == (Y * 2).tolist()


def test_examples_before_batches() -> None:
    rows = list(arrays(X, Y))
    assert [(x.tolist(), y.item()) for x, y in rows] == [
        (x.tolist(), y.item()) for x, y in zip(X, Y, strict=True)
    ]
    assert [y.item() for y in arrays(Y).map(lambda y: y * 2).repeat(2)] == 2 * (Y * 2).tolist()
    shuffled = [y.item() for y in arrays(Y).shuffle(1)]
    assert sorted(shuffled) == Y.tolist() != shuffled
    stream = Dataset(ExampleStream(Stream())).map(lambda x, y: (x.sum(), y))
    assert [y for _, y in stream] == Y.tolist()
    assert [x.item() for x, _ in stream] == X.sum(1).tolist()
    endless = iter(arrays(Y).repeat())
    assert [next(endless).item() for _ in range(12)] == [*range(10), 0, 1]

    class Faulty:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            if index == 1:
                raise CorruptSampleError("one")
            return index

    assert list(Dataset(Faulty())) == [0, 2]


def test_prefetch_changes_nothing() -> None:
    plain = labels(arrays(X, Y).shuffle(4).batch(3))
    assert labels(arrays(X, Y).shuffle(4).batch(3).prefetch(2)) == plain
    assert labels(arrays(X, Y).shuffle(4).batch(3).prefetch(3, threads=4)) == plain


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Dataset(ExampleStream([1])).shuffle(), r"shuffle\(\) of a ExampleStream"),
        (lambda: per_worker(lambda context: []).shuffle(), r"shuffle\(\) of a PerWorker"),
        (lambda: arrays(X).batch(2).batch(2), r"batch\(2\) of batches"),
        (lambda: Dataset(BatchStream([1])).batch(2), r"batch\(2\) of batches"),
        (lambda: arrays(X).batch(0), r"batch size of 0"),
        (lambda: arrays(X).batch(2.5), r"batch size of 2\.5"),  # type: ignore[arg-type]
        (lambda: arrays(X).repeat(0), r"repeat\(0\)"),
        (lambda: arrays(X).prefetch(-1), r"prefetch\(-1\)"),
        (lambda: arrays(X).repeat(1.5), r"repeat\(1\.5\)"),  # type: ignore[arg-type]
        (lambda: arrays(X).map(None), r"map\(None\)"),  # type: ignore[arg-type]
        (lambda: arrays(X).shuffle("a"), r"shuffle\(seed='a'\)"),  # type: ignore[arg-type]
        (lambda: arrays(X).skip_corrupt(-1), r"skip_corrupt\(-1\)"),
        (lambda: arrays(X).batch(2).map(RandomFlip()), "of a whole batch"),
        (lambda: Dataset(BatchStream([1])).map(RandomFlip()), "of a whole batch"),
        (lambda: arrays(X, Y[:3]), "arrays of 10, 3 examples"),
        (lambda: arrays(X, None, Y), "further parts and no y"),
        (lambda: as_dataset(3), "int is no data"),
        (lambda: as_dataset("photos/train"), "str is no data"),
        (lambda: as_dataset(()), r"arrays\(\) got no array"),
        (lambda: as_dataset(None), "NoneType is no data"),
        (lambda: as_dataset(next(iter(Loader(arrays(X).batch(2))))), "Batch is no data"),
    ],
)
def test_chains_that_cannot_be(make: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        make()


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (X.numpy(), Y.tolist()),
        TensorDataset(X, Y),
        Subset(TensorDataset(X, Y), range(10)),
        Stream(),
        DataLoader(TensorDataset(X, Y), batch_size=4),
        DataLoader(Stream(), batch_size=4),
        DataLoader(TensorDataset(X, Y), batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        [(x, int(y)) for x, y in zip(X, Y, strict=True)],
        (pair for pair in [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])]),
        arrays(X, Y),
        arrays(X, Y).batch(4),
    ],
    ids=lambda data: type(data).__name__,
)
def test_whatever_users_bring(data: Any) -> None:
    chain = as_dataset(data, 4)
    batches = list(chain)
    assert all(isinstance(batch, tuple) for batch in batches)
    assert [len(batch[1]) for batch in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([torch.as_tensor(x) for x, _ in batches]), X)
    assert torch.cat([torch.as_tensor(y) for _, y in batches]).tolist() == Y.tolist()


def test_one_array_a_dict_and_functions() -> None:
    assert torch.equal(torch.cat(list(as_dataset(X, 3))), X)
    assert torch.equal(torch.cat(list(as_dataset(X.numpy(), 3))), X)
    named = list(as_dataset({"x": X, "y": Y}, 6))
    assert named[1]["y"].tolist() == [6, 7, 8, 9]
    made = per_worker(lambda context: [(X[:2], Y[:2])] * (context.data_shard[1] + 1))
    assert as_dataset(made) is made
    assert isinstance(made.source, PerWorker)
    assert labels(made) == [[0, 1], [0, 1]]


def test_loaders_of_torch() -> None:
    pairs = TensorDataset(X, Y)
    ours = as_dataset(DataLoader(pairs, batch_size=4, shuffle=True, drop_last=True))
    assert (ours.shuffled, ours.batch_size, ours.drop_remainder) == (True, 4, True)
    assert ours.batch_sampler is None
    shuffled = as_dataset(DataLoader(pairs, 4, shuffle=True))
    assert sorted(label for batch in labels(shuffled) for label in batch) == Y.tolist()
    padded = DataLoader(pairs, 5, collate_fn=lambda found: {"n": torch.tensor(len(found)).view(1)})
    assert [batch["n"].item() for batch in as_dataset(padded)] == [5, 5]
    share: Any = DistributedSampler(pairs, num_replicas=2, rank=0)
    with pytest.raises(UserError, match="a DistributedSampler for 2 replicas"):
        as_dataset(DataLoader(pairs, 4, sampler=share))
    drawn = as_dataset(DataLoader(pairs, 4, sampler=WeightedRandomSampler([1.0] * 10, 5)))
    assert (drawn.examples, drawn.steps_per_pass) == (None, 2)
    with pytest.raises(UserError, match=r"shuffle\(\) of what a WeightedRandomSampler draws"):
        drawn.shuffle()


def test_who_gathers() -> None:
    assert arrays(X).gathers
    assert not arrays(X).map(lambda x: x).gathers
    assert not Dataset([1, 2]).gathers
    assert arrays(np.arange(3)).examples == 3
