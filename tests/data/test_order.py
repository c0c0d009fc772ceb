"""The order of examples is a pure function, the same at any number of replicas."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spartito.data.reading.order import (
    example_generator,
    group_rows,
    permutation,
    shard_rows,
    steps,
)

SEEDS = st.integers(-(2**63), 2**64 - 1)


@given(size=st.integers(0, 500), world_size=st.integers(1, 40), least=st.integers(1, 3))
def test_data_shards_are_a_partition_of_even_parts(size: int, world_size: int, least: int) -> None:
    shards = [shard_rows(size, (rank, world_size), least) for rank in range(world_size)]
    assert [offset for part in shards for offset in part] == list(range(size))
    sizes = [len(part) for part in shards]
    parties = [count for count in sizes if count]
    assert sizes[: len(parties)] == parties  # the first ones take part
    assert not parties or max(parties) - min(parties) <= 1
    assert not parties or min(parties) >= min(least, size)
    assert len(parties) == min(world_size, max(size // least, min(size, 1)))


@given(count=st.integers(0, 300), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_a_permutation_has_every_example_once(count: int, seed: int, epoch: int) -> None:
    order = permutation(count, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))
    assert np.array_equal(order, permutation(count, seed, epoch))


def test_orders_differ_by_seed_and_epoch() -> None:
    orders = {tuple(permutation(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@given(count=st.integers(0, 1000), batch_size=st.integers(1, 100))
def test_steps_cover_the_examples(count: int, batch_size: int) -> None:
    whole, some = steps(count, batch_size, True), steps(count, batch_size, False)
    assert whole * batch_size <= count < (whole + 1) * batch_size
    assert (some - 1) * batch_size < count <= some * batch_size or count == some == 0


def draws(seed: int, epoch: int, index: int) -> tuple[int, ...]:
    return tuple(example_generator(seed, epoch, index).integers(0, 2**62, 3).tolist())


KEYS = st.tuples(SEEDS, st.integers(0, 2**40), st.integers(0, 2**60))


@given(one=KEYS, other=KEYS)
def test_every_example_of_every_epoch_has_its_own_randomness(
    one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    assert draws(*one) == draws(*one)
    same = (one[0] % 2**64, *one[1:]) == (other[0] % 2**64, *other[1:])
    assert (draws(*one) == draws(*other)) == same


def test_neighbours_share_no_numbers() -> None:
    keys = [(s, e, i) for s in range(4) for e in range(4) for i in range(40)]
    seen = [number for key in keys for number in draws(*key)]
    assert len(set(seen)) == len(seen)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Data shards in groups: in any order, one in each at least."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    shards = iter(draw(st.permutations(range(sum(sizes)))))
    return tuple(tuple(sorted(next(shards) for _ in range(size))) for size in sizes)


@given(size=st.integers(0, 60), groups=grouped(), least=st.integers(1, 3))
def test_a_group_has_the_same_rows_however_it_divides_them(
    size: int, groups: tuple[tuple[int, ...], ...], least: int
) -> None:
    parts = [[group_rows(size, shard, groups, least) for shard in group] for group in groups]
    assert [row for part in parts for rows in part for row in rows] == list(range(size))
    seen = [sum(map(len, part)) for part in parts]
    assert all(count == 0 or count >= min(least, size) for count in seen)
    if len({*map(len, groups)}) == 1:
        alone = [shard_rows(size, (index, len(groups)), least) for index in range(len(groups))]
        assert seen == [len(rows) for rows in alone]
