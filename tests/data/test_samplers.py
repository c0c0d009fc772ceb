"""Loaders of torch with samplers and worker processes of their own, against torch itself."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from spartito.data.dataset import as_dataset
from spartito.data.reading import passes
from spartito.data.reading.loader import Loader
from spartito.errors import CorruptSampleError, UserError

COUNT = 90


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index])


class Biased(RandomSampler):
    """A sampler that somebody derived: the first third, by Python's generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(COUNT), COUNT // 3))

    def __len__(self) -> int:
        return COUNT // 3


class Buckets(Sampler[list[int]]):
    """Batches of unequal sizes, by numpy's generator; nobody knows how many."""

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(COUNT)
        for cut in (slice(0, 7), slice(7, 40), slice(40, 42), slice(42, COUNT)):
            yield order[cut].tolist()


class Endless(Sampler[int]):
    """It has no length, and no end unless it is given one."""

    def __init__(self, turns: int | None = None) -> None:
        self.turns = turns

    def __iter__(self) -> Iterator[int]:
        for _ in count() if self.turns is None else range(self.turns):
            yield from torch.randperm(20).tolist()


def own(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "subclass": lambda: {"sampler": Biased(Numbers())},
    "replacement": lambda: {"sampler": RandomSampler(Numbers(), replacement=True)},
    "fewer": lambda: {"sampler": RandomSampler(range(30))},
    "more": lambda: {"sampler": RandomSampler(Numbers(), num_samples=200)},
    "in order, fewer": lambda: {"sampler": SequentialSampler(range(30))},
    "a list": lambda: {"sampler": [5, 3, 88, 3]},
    "without a length": lambda: {"sampler": Endless(3)},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(0, COUNT, 2))},
    "its own generator": lambda: {"sampler": SubsetRandomSampler(range(COUNT), own(4))},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * 45 + [0.0] * 45, 60)},
    "batches": lambda: {
        "batch_size": 1,
        "batch_sampler": BatchSampler(SequentialSampler(Numbers()), 7, drop_last=True),
    },
    "shuffled batches": lambda: {
        "batch_size": 1,
        "batch_sampler": BatchSampler(RandomSampler(Numbers()), 7, drop_last=True),
    },
    "unequal batches": lambda: {"batch_size": 1, "batch_sampler": Buckets()},
}


def rows(loader: DataLoader[Any], world_size: int, start: int = 0) -> list[list[list[int]]]:
    """The global batches of two passes from step ``start`` of the first on, of all replicas."""
    chain = as_dataset(loader)
    readers = [Loader(chain, (rank, world_size), seed=3) for rank in range(world_size)]
    passes = []
    for reader in readers:
        reader.load_state_dict({"pass": 0, "step": start})
    for _ in range(2):
        found = []
        iterators = [iter(reader) for reader in readers]
        while parts := [part for part in (next(i, None) for i in iterators) if part is not None]:
            torch.rand(len(iterators))  # the model draws too, not equally on all replicas
            assert len(parts) == world_size
            found.append([int(n) for part in parts for n in part.data.flatten()])
            assert {part.global_size for part in parts} == {len(found[-1])}
        passes.append(found)
    return passes


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_kept_at_any_number_of_replicas(name: str) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Numbers(), **{"batch_size": 8, **SAMPLERS[name]()})

    plain = [batch.flatten().tolist() for batch in loader()]
    alone = rows(loader(), 1)
    assert [len(batch) for batch in alone[0]] == [len(batch) for batch in plain]
    if name in ("in order, fewer", "a list", "batches", "its own generator"):
        assert alone[0] == plain
    assert {n for batch in alone[0] for n in batch} <= set(
        range(45 if name == "weighted" else COUNT)
    )
    for world_size in (2, 3):
        assert rows(loader(), world_size) == alone
    if name not in ("in order, fewer", "a list", "batches"):
        assert alone[0] != alone[1]
    resumed = rows(loader(), 2, start=1)
    assert (resumed[0], resumed[1]) == (alone[0][1:], alone[1])


def test_samplers_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MOST", 100)
    endless = as_dataset(DataLoader(Numbers(), batch_size=8, sampler=Endless()))
    with pytest.raises(UserError, match=r"Endless seems to have no end: 9,1.. examples in pass 0"):
        next(iter(Loader(endless)))
    empties: list[list[list[int]]] = [[[0, 1], []], [[]]]
    for empty in empties:
        with pytest.raises(UserError, match=r"list drew batch \d of pass 0 without an example"):
            next(iter(Loader(as_dataset(DataLoader(Numbers(), batch_sampler=empty)))))
    texts: Any = ["a", "b"]
    with pytest.raises(UserError, match="list draws no numbers of examples"):
        next(iter(Loader(as_dataset(DataLoader(Numbers(), batch_size=2, sampler=texts)))))


def test_streams_draw_the_same_on_every_replica() -> None:
    class Noise(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(10):
                yield (torch.rand(1) * 1000).long()

    whole: DataLoader[Any] = DataLoader(Numbers(), batch_size=None, shuffle=True)
    for loader in (DataLoader(Noise(), 4), whole):
        assert rows(loader, 2) == rows(loader, 1)


class Busy(Dataset[Tensor]):
    """Tells who reads it; a data set that keeps its position would mix up two readers."""

    ready = False

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        if index == 7:
            raise CorruptSampleError("number 7 is broken")
        info: Any = get_worker_info()
        return torch.tensor([index, os.getpid(), info.id, int(info.dataset.ready)])


def prepare(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.ready = True


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than one core has
def test_worker_processes_are_kept() -> None:
    for persistent in (False, True):
        loader = DataLoader(
            Busy(),
            8,
            shuffle=True,
            num_workers=2,
            worker_init_fn=prepare,
            persistent_workers=persistent,
        )
        reader = Loader(as_dataset(loader), seed=1)
        reader.load_state_dict({"pass": 0, "step": 2})
        state = torch.get_rng_state()
        passes = [torch.cat([batch.data for batch in reader]) for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), state)  # from which the model draws
        assert len(passes[0]) in (23, 24)  # from the third batch on
        counts = Counter(passes[1][:, 0].tolist())
        assert counts == Counter(n for n in range(40) if n != 7)
        assert os.getpid() not in passes[1][:, 1]
        assert set(passes[1][:, 2].tolist()) == {0, 1}
        assert passes[1][:, 3].all()
        pids = [set(found[:, 1].tolist()) for found in passes]
        assert (pids[0] == pids[1]) == persistent


def test_an_error_of_ours_in_a_worker_process_stays_short() -> None:
    class Ragged(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            return torch.zeros(index)

    loader = DataLoader(Ragged(), 8, num_workers=1, collate_fn=as_dataset([1]).collate)
    with pytest.raises(UserError, match="in one batch") as info:
        list(Loader(as_dataset(loader)))
    assert "Traceback" not in str(info.value)
