"""After which updates fragments meet."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.errors import UserError
from spartito.outer.fragment_schedule import Turns, turns_of


@st.composite
def all_turns(draw: st.DrawFn) -> Turns:
    every = draw(st.integers(1, 30))
    return Turns(draw(st.integers(1, every)), every, draw(st.integers(0, every)))


@given(all_turns(), st.integers(0, 100))
def test_fragments_meet_in_turn(turns: Turns, first: int) -> None:
    """Each once in any ``every`` updates, no two after the same, evenly."""
    window = range(first + 1, first + turns.every + 1)
    found = [n for u in window for n in range(turns.fragments) if turns.begins(n, u)]
    assert sorted(found) == list(range(turns.fragments))
    apart = [
        [u for u in range(1, 4 * turns.every) if turns.begins(n, u)] for n in range(turns.fragments)
    ]
    taken = sorted(update for each in apart for update in each)
    gaps = {b - a for a, b in pairwise(taken)}
    assert max(gaps) - min(gaps) <= 1
    assert min(gaps) >= 1


@given(all_turns(), st.integers(0, 100))
def test_nothing_is_missed_by_looking_ahead(turns: Turns, updates: int) -> None:
    begins = [
        u
        for u in range(updates + 1, updates + turns.every + 1)
        if any(turns.begins(n, u) for n in range(turns.fragments))
    ]
    assert turns.next(updates) == begins[0]


@given(all_turns())
def test_a_delay_moves_when_it_is_taken_and_not_when_it_is_merged(turns: Turns) -> None:
    waiting = Turns(turns.fragments, turns.every)
    for number in range(turns.fragments):
        for update in range(1, 3 * turns.every):
            if turns.begins(number, update):
                assert waiting.begins(number, update + turns.delay)


@given(st.integers(1, 60), st.data())
def test_what_overlaps_by_itself_is_there_before_the_next(every: int, data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, every))
    found = turns_of(fragments, every, True, None)
    assert found.mixing == 0.5
    assert 1 <= found.delay <= max(1, every // 4)
    assert found.delay < max(2, every // fragments)
    assert turns_of(fragments, every, False, None) == Turns(fragments, every, 0, 0.0)


@pytest.mark.parametrize(
    ("fragments", "overlap", "mixing", "text"),
    [
        (5, False, None, "fragments=5 with every=4"),
        (0, False, None, "fragments=0"),
        (1, 5, None, "overlap=5 with every=4"),
        (1, -1, None, "overlap=-1"),
        (1, "4", None, "overlap='4'"),
        (1, None, None, "overlap=None"),
        (1, True, 1.01, "mixing=1.01"),
        (1, True, True, "mixing=True"),
        (1, True, float("nan"), "mixing=nan"),
        (1, True, "0.5", "mixing='0.5'"),
    ],
)
def test_other_turns_are_refused(fragments: Any, overlap: Any, mixing: Any, text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        turns_of(fragments, 4, overlap, mixing)
