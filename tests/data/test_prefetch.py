"""Reading ahead keeps the order, passes errors on, and ends its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.data.reading.prefetch import read_ahead


def reading() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("spartito-data")]


def numbers(count: int) -> Iterator[Callable[[], int]]:
    return iter([partial(int, n) for n in range(count)])


@given(st.integers(0, 30), st.integers(0, 8), st.integers(1, 4))
@settings(max_examples=40)
def test_the_order_stays(count: int, depth: int, threads: int) -> None:
    assert list(read_ahead(numbers(count), depth, threads)) == list(range(count))
    assert reading() == []


def test_slow_tasks_come_in_their_order_too() -> None:
    second = threading.Event()

    def slow() -> int:
        assert second.wait(20)  # the one behind it must have begun: they run side by side
        return 1

    def quick() -> int:
        second.set()
        return 2

    assert list(read_ahead(iter([slow, quick]), 2, 2)) == [1, 2]


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_an_error_comes_in_its_order(depth: int) -> None:
    def fail() -> int:
        raise ValueError("broken")

    values = read_ahead(iter([*numbers(3), fail, *numbers(3)]), depth, 2)
    assert [next(values) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="broken"):
        next(values)
    assert reading() == []


def test_closing_ends_the_threads_and_starts_nothing_more() -> None:
    asked: list[int] = []

    def ask(number: int) -> int:
        asked.append(number)
        return number

    batches = read_ahead((partial(ask, n) for n in range(100)), 3, 2)
    assert next(batches) == 0
    assert reading() != []
    batches.close()
    assert reading() == []
    assert max(asked) <= 4


def test_no_more_is_read_ahead_than_asked_for() -> None:
    given_out: list[int] = []

    def tasks() -> Iterator[Callable[[], int]]:
        for n in range(10):
            given_out.append(n)
            yield partial(int, n)

    batches = read_ahead(tasks(), 2, 1)
    for n in range(10):
        assert next(batches) == n
        assert len(given_out) == min(10, n + 3)
    assert list(batches) == []
    plain = read_ahead(tasks(), 0, 1)
    given_out.clear()
    assert next(plain) == 0
    assert given_out == [0]
