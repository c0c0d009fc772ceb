"""Which groups are merged together: pure, so any order of arrivals can be tried."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.ps.protocol.work import REJECTED, Arrival, Merge
from spartito.ps.scheduler.gathering import Gathering
from spartito.ps.scheduler.progress import Numbers

ALL = {0, 1, 2}


def begun(quorum: int, grace: float = 0.0, bound: int | None = None) -> Gathering:
    made = Gathering(quorum, grace, bound, Numbers())
    for group in ALL:
        made.begin(group)
    return made


def came(found: Gathering, group: int, now: float = 0.0, weight: float = 1.0) -> None:
    found.arrive(group, Arrival(1, group + 1, weight), now)


def decided(
    found: Gathering, now: float = 0.0, away: frozenset[int] = frozenset(), free: int = 0
) -> list[dict[int, Merge]]:
    each = found.decide(now, away, free, ALL)
    return [{group: merge for group, (_, merge) in one.items()} for one in each]


def test_a_quorum_is_waited_for_and_then_the_grace() -> None:
    found = begun(quorum=2, grace=1.0)
    came(found, 0, now=5.0)
    assert decided(found, 9.0, away=frozenset({1, 2})) == []
    came(found, 1, now=9.0)
    assert decided(found, 9.9, away=frozenset({2})) == []
    (merged,) = decided(found, 10.0, away=frozenset({2}))
    assert merged == dict.fromkeys((0, 1), Merge(1, 2))
    came(found, 2, now=11.0, weight=2.0)  # it missed the meeting
    (late,) = decided(found, 11.0, free=2)
    assert late == {2: Merge(2, 1, share=0.5, staleness=1)}


def test_a_short_stretch_counts_as_much_as_a_long_one() -> None:
    """Alone: what it has moved is short by itself. Its other weight is for the mean of several."""
    found = Gathering(1, 0.0, None, Numbers())
    for group, weight, updates in ((0, 640.0, 20), (1, 96.0, 3), (0, 640.0, 20), (1, 192.0, 3)):
        found.begin(group)
        found.arrive(group, Arrival(1, group + 1, weight, updates=updates), 0.0)
        ((arrival, merge),) = (one[group] for one in found.decide(0.0, {1 - group}, 0, {0, 1}))
        assert arrival.weight == weight
        assert merge.share == pytest.approx(2 / 3 if weight == 192.0 else 1 / 2)


def test_all_that_can_come_are_enough() -> None:
    """At the end of an epoch, and when others are lost, fewer than a quorum are there."""
    found = begun(quorum=3, grace=9.0)
    came(found, 0)
    assert decided(found, away=frozenset({1})) == []
    assert decided(found, free=1) == []
    (alone,) = decided(found)
    assert alone == {0: Merge(1, 1, share=1 / 3)}


def test_what_is_too_old_is_rejected_and_counted() -> None:
    found = begun(quorum=1, bound=1)
    for merges in range(2):
        found.begin(0)
        came(found, 0)
        assert decided(found, away=frozenset({1, 2}))[0][0].number == merges + 1
    came(found, 1)
    assert decided(found, away=frozenset({2})) == [{1: REJECTED}]
    found.begin(1)
    came(found, 1)
    assert decided(found, away=frozenset({2}))[0][1].staleness == 0
    done = found.take()
    assert [(done[g].merges, done[g].rejected) for g in (0, 1)] == [(2, 0), (1, 1)]
    assert found.staleness == Counter({0: 3})
    assert found.take() == {}


@given(
    quorum=st.integers(1, 3),
    bound=st.none() | st.integers(0, 3),
    order=st.lists(st.tuples(st.sampled_from(sorted(ALL)), st.booleans()), max_size=40),
)
def test_every_arrival_gets_one_verdict_and_nobody_waits_beyond_a_quorum(
    quorum: int, bound: int | None, order: list[tuple[int, bool]]
) -> None:
    found, here, verdicts = begun(quorum, bound=bound), Counter[int](), Counter[int]()
    numbers: list[int] = []
    for group, leaves in order:
        if leaves:
            here[group] -= found.waits(group)
            found.leave(group)
            found.begin(group)
        elif not found.waits(group):
            came(found, group)
            here[group] += 1
        away = frozenset(g for g in ALL if not found.waits(g))
        for merged in decided(found, away=away):
            for one, merge in merged.items():
                verdicts[one] += 1
                assert merge.parties == len(merged) or merge == REJECTED
                assert bound is None or merge.staleness <= bound
                assert 0 < merge.share <= 1
            numbers += {merge.number for merge in merged.values() if merge.number}
            for one in merged:
                found.begin(one)
        waiting = [g for g in ALL if found.waits(g)]
        assert len(waiting) < max(quorum, 1)
    assert numbers == list(range(1, len(numbers) + 1))
    assert all(verdicts[g] == here[g] - found.waits(g) for g in ALL)


@pytest.mark.parametrize("bound", [None, 0])
def test_a_quorum_of_all_is_never_late(bound: int | None) -> None:
    found = begun(quorum=3, bound=bound)
    for number in range(1, 4):
        for group in (2, 0, 1):
            came(found, group, weight=0.0)
        (merged,) = decided(found)
        assert merged == dict.fromkeys((0, 1, 2), Merge(number, 3))
        for group in ALL:
            found.begin(group)
