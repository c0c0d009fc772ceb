"""Ranges are a set of numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spartito.ps.scheduler.ranges import Ranges

RANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)))


@given(RANGES)
def test_spans_are_a_set_of_numbers(changes: list[tuple[bool, int, int]]) -> None:
    spans, numbers = Ranges(), set[int]()
    for adds, start, stop in changes:
        if adds:
            spans.add(start, stop)
            numbers |= set(range(start, stop))
        else:
            spans.remove(start, stop)
            numbers -= set(range(start, stop))
    assert {n for start, stop in spans for n in range(start, stop)} == numbers
    assert all(n in spans for n in numbers)
    ranges = list(spans)
    assert all(a[1] < b[0] for a, b in pairwise(ranges))
    assert bool(spans) == bool(numbers)
    assert spans.within(5, 20) == len(numbers & set(range(5, 20)))
    assert spans.frontier() == min(set(range(32)) - numbers)
    assert spans.end() == max(numbers, default=-1) + 1
