"""A worker's batches are those of its leases, whatever was read ahead before."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import islice

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.data import Dataset
from spartito.data.reading.loader import make_feed
from spartito.data.reading.order import permutation
from spartito.data.reading.passes import Pass, Passes
from spartito.ps.protocol.work import Lease
from spartito.steps.servers.lease_readers import IndexedReader

EXAMPLES, BATCH, SLICES = 50, 6, 2
STEPS = -(-EXAMPLES // BATCH)


class Counting:
    """A data set that notes how often each example was read."""

    def __init__(self) -> None:
        self.reads: Counter[int] = Counter()
        self.readers: set[int] = set()

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads[index] += 1
        self.readers.add(threading.get_ident())
        return torch.tensor([float(index)]), torch.tensor(index)


def lease(number: int, index: int, start: int, stop: int) -> Lease:
    return Lease(1, 0, number, index, start, stop)


def data(examples: Counting) -> Dataset:
    return Dataset(examples).shuffle().batch(BATCH).prefetch(2)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.integers(0, SLICES - 1), st.integers(0, STEPS - 1),
            st.integers(1, 4), st.booleans(),
        ),
        max_size=8,
    )
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_batches_are_those_of_the_lease(given: list[tuple[int, int, int, int, bool]]) -> None:
    chain = data(Counting())
    reader = IndexedReader(chain, SLICES, seed=3)
    for number, index, start, length, leaves in given:
        stop = min(STEPS, start + length)
        feed = make_feed(chain, (index, SLICES), 3)
        expected = [task() for task in islice(feed.tasks(number, start), stop - start)]
        batches = reader.read(lease(number, index, start, stop))
        if leaves:  # after the first one; the next lease may begin there, or elsewhere
            found, expected = [next(batches)], expected[:1]
            batches.close()
        else:
            found = list(batches)
        assert [(b.epoch, b.step, b.y.tolist()) for b in found] == [
            (b.epoch, b.step, b.y.tolist()) for b in expected
        ]
    reader.close()


def test_leases_that_follow_each_other_read_each_example_once() -> None:
    examples = Counting()
    reader = IndexedReader(data(examples), 1, seed=3)
    for start in range(0, STEPS, 2):
        list(reader.read(lease(0, 0, start, min(STEPS, start + 2))))
    assert set(examples.reads.values()) == {1}
    assert sum(examples.reads.values()) == EXAMPLES


def test_leases_here_and_there_are_read_by_one_thread_and_nothing_beside_them() -> None:
    examples = Counting()
    reader = IndexedReader(data(examples), SLICES, seed=3)
    given = [(0, 0, 2), (1, 4, 6), (0, 4, 5), (1, 0, 3), (0, 6, 8)]
    for index, start, stop in given:
        list(reader.read(lease(0, index, start, stop)))
    reader.close()
    steps = sum(stop - start for _, start, stop in given)
    assert set(examples.reads.values()) == {1}
    assert sum(examples.reads.values()) == steps * BATCH // SLICES
    assert len(examples.readers - {threading.get_ident()}) == 1


def test_a_closed_reader_leaves_no_threads() -> None:
    before = threading.active_count()
    reader = IndexedReader(data(Counting()), 1, seed=3)
    next(reader.read(lease(0, 0, 0, 4)))
    reader.close()
    assert threading.active_count() == before


def test_a_pass_is_sorted_once() -> None:
    passes = Passes(data(Counting()), 7)
    first = passes.of(4)
    assert passes.of(4) is first
    order = permutation(EXAMPLES, 7, 4).tolist()
    assert [i for step in range(STEPS) for i in found(first, step)] == order
    assert found(passes.of(5), 0) == permutation(EXAMPLES, 7, 5).tolist()[:BATCH]


def found(one: Pass, step: int) -> list[int]:
    indices = one.indices(step, torch.arange(one.size(step)))
    assert isinstance(indices, torch.Tensor)
    return [int(index) for index in indices]
