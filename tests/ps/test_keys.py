"""A set of work items that knows each of them exactly, also after it was written and read."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spartito.ps.protocol.fields import MOST
from spartito.ps.protocol.keys import ROW, Key, Keys


@st.composite
def work_items(draw: st.DrawFn) -> tuple[int, list[list[Key]]]:
    data_shards = draw(st.integers(1, 9))
    key = st.tuples(
        st.integers(0, 2), st.integers(0, 2), st.integers(0, 700), st.integers(0, data_shards - 1)
    )
    return data_shards, draw(st.lists(st.lists(key, max_size=6), max_size=12))


@given(work_items())
def test_they_are_a_set(given: tuple[int, list[list[Key]]]) -> None:
    data_shards, pushes = given
    keys, known = Keys(data_shards), set[Key]()
    for push in pushes:
        assert keys.add(push) == len(set(push) - known)
        known |= set(push)
    for made in (keys, Keys.load(data_shards, keys.dump())):
        assert len(made) == len(known)
        assert set(made) == known
        assert sorted(made) == sorted(known)
        assert all(key in made for key in known)
        for stream, number, step, index in known:
            near = [(stream, number, step + 1, index), (stream, number + 1, step, index)]
            near += [
                (stream, number, step, (index + 1) % data_shards),
                (stream + 1, number, step, index),
            ]
            assert [key in made for key in near] == [key in known for key in near]


@given(
    st.integers(1, 9),
    st.sets(st.integers(0, 849), max_size=6),
    st.integers(0, 50),
    st.integers(0, 800),
)
def test_what_is_missing_of_a_range(
    data_shards: int, absent: set[int], start: int, length: int
) -> None:
    keys = Keys(data_shards)
    keys.add(  # all but few: what is overlooked of the last chunk would be missing
        (1, 0, step, index)
        for step in range(850)
        for index in range(data_shards)
        if step not in absent
    )
    for index in range(data_shards):
        found = keys.missing(1, 0, index, start, start + length)
        steps = [step for first, last in found for step in range(first, last)]
        assert steps == [step for step in range(start, start + length) if step in absent]
        assert all(a[1] < b[0] for a, b in pairwise(found))


def test_there_are_as_many_slices_as_data_shards() -> None:
    keys = Keys(3)
    for key, is_one in {
        (0, 0, 0, 2): True,
        (0, 0, 0, 3): False,  # its bit would be that of the next step
        (0, 0, 1, -1): False,
        (0, 0, -1, 0): False,
        (-1, 0, 0, 0): False,
        (0, 0, *divmod(MOST - 1, 3)): True,
        (0, 0, *divmod(MOST, 3)): False,
    }.items():
        assert keys.accepts(key) is is_one, key


def test_a_work_item_takes_a_bit() -> None:
    keys = Keys(2)
    assert keys.add((1, 0, step, 0) for step in range(100_000)) == 100_000
    assert len(keys.dump()) < 1.5 * 2 * 100_000 / 8


def test_a_work_item_far_ahead_takes_no_more() -> None:
    keys = Keys(1)
    assert keys.add((1, number, MOST - 1, 0) for number in range(1000)) == 1000
    assert len(keys.dump()) == 1000 * ROW.size


def test_loaded_keys_are_no_view_of_what_was_dumped() -> None:
    keys = Keys(1)
    keys.add([(0, 0, 0, 0)])
    dumped = keys.dump()
    loaded = Keys.load(1, dumped)
    loaded.add([(0, 0, 1, 0)])
    assert (0, 0, 1, 0) not in keys
    assert dumped == keys.dump()
