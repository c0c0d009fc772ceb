"""Who may go on when tasks are lost: never two sides at once."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import ClusterSpec, Task
from spartito.collectives.membership.generations import (
    Card,
    Generation,
    Seen,
    Vote,
    cluster_of,
    may_go_on,
    next_generation,
)
from spartito.life import Life
from tests.skips import on_linux

ELSEWHERE = Life("elsewhere", 1, 1)
RANKS = st.sets(st.integers(0, 6), min_size=1)


def card(rank: int, token: str = "first", local_rank: int | None = None) -> Card:
    return Card(
        f"worker {rank}", rank, rank if local_rank is None else local_rank, token, ELSEWHERE
    )


def seen(
    last: set[int], here: set[int], comes: Set[int] = frozenset(), dead: Set[int] = frozenset(),
    lost: bool = True,
) -> Seen:  # fmt: skip
    return Seen(
        Generation(3, tuple(card(rank) for rank in sorted(last))),
        {rank: Vote(card(rank), tuple(dead), lost) for rank in here},
        {rank: card(rank, "second") for rank in comes},
        frozenset(),
    )


@given(RANKS, st.data())
def test_two_sides_never_both_go_on(last: set[int], data: st.DataObject) -> None:
    """Each knows some of the dead, who are on neither side."""
    where = {rank: data.draw(st.sampled_from("abd-")) for rank in last}
    one, other, dead = ({rank for rank in last if where[rank] == side} for side in "abd")
    known = [{rank for rank in dead if data.draw(st.booleans())} for _ in range(2)]
    both = may_go_on(last, one, known[0]) and may_go_on(last, other, known[1])
    assert not both or not (one and other)


@given(RANKS)
def test_all_that_live_go_on_and_so_does_a_majority(last: set[int]) -> None:
    lowest = min(last)
    assert may_go_on(last, last - {lowest}, {lowest})
    half = sorted(last)[: len(last) // 2 + 1]
    assert may_go_on(last, half, set())


def test_of_two_halves_the_one_with_the_lowest_rank_goes_on() -> None:
    assert may_go_on({1, 2, 4, 5}, {1, 5}, set())
    assert not may_go_on({1, 2, 4, 5}, {2, 4}, set())
    assert not may_go_on({1, 2, 4, 5}, {2, 3, 0}, set())


WAITS, GOES_ON = Recovery(wait=10), Recovery(min_workers=2, wait=10)


@pytest.mark.parametrize(
    ("found", "recovery", "waited", "members"),
    [
        (seen({0, 1, 2}, {0, 1}, dead={2}), WAITS, 99, None),
        (seen({0, 1, 2}, {0, 1}, {2}, dead={2}), WAITS, 0, [0, 1, 2]),
        (seen({0, 1, 2}, {0, 1}, {2}), WAITS, 0, [0, 1, 2]),  # replaced, though it may live
        (seen({0, 1, 2}, {0}, {1, 2}), WAITS, 99, None),  # those who come have no vote
        (seen({0, 1, 2}, {0, 1}), GOES_ON, 9, None),
        (seen({0, 1, 2}, {0, 1}), GOES_ON, 10, [0, 1]),
        (seen({0, 1, 2}, {0}, dead={1, 2}), GOES_ON, 99, None),  # too few
        (seen({0, 1}, {0, 1}, {2}, lost=False), WAITS, 0, [0, 1, 2]),
        (seen({0, 1}, {0, 1}, {2}, lost=False), Recovery(), 0, [0, 1, 2]),
        (seen({0, 1, 2}, set(), {0, 1, 2}), WAITS, 99, None),  # the members may live
    ],
)
def test_the_next_generation(
    found: Seen, recovery: Recovery, waited: float, members: list[int] | None
) -> None:
    made = next_generation(found, 3, recovery, waited)
    assert (None if made is None else [one.rank for one in made.members]) == members
    assert made is None or made.number == 4


def test_a_vote_of_another_process_of_that_rank_counts_nothing() -> None:
    found = seen({0, 1, 2}, {0, 1})
    strange = replace(found, votes={**found.votes, 1: Vote(card(1, "old"), (), True)})
    assert strange.side == {0}


def test_when_all_are_dead_those_who_come_begin_anew() -> None:
    found = replace(seen({0, 1}, set(), {0, 1}), dead=frozenset({0, 1}))
    made = next_generation(found, 2, WAITS, 0)
    assert made is not None
    assert all(one.token == "second" for one in made.members)


def test_the_cluster_of_those_who_are_left_keeps_their_names() -> None:
    job = ClusterSpec(
        {"chief": ("a:1",), "worker": ("a:2", "b:1", "b:2")},
        Task("worker", 2), 3, 4, 1, 2, "a:1", "the test",
    )  # fmt: skip
    cards = [card(0, local_rank=0), card(1, local_rank=1), card(2, local_rank=0), card(3, "", 1)]
    left = cluster_of(job, Generation(1, (cards[1], cards[3])), cards[3])
    assert [left.name_of(rank) for rank in range(2)] == ["worker 0 (a:2)", "worker 2 (b:2)"]
    assert (left.rank, left.world_size, left.local_rank, left.local_size) == (1, 2, 0, 1)
    assert not left.is_chief
    first = cluster_of(replace(job, task=Task("worker", 0), rank=1, local_rank=1),
                       Generation(1, (cards[1], cards[3])), cards[1])  # fmt: skip
    assert first.is_chief


def test_cards_come_back_from_the_store_as_they_were() -> None:
    made = Generation(2, (card(0), card(1)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Generation) == made


@on_linux
def test_only_a_process_of_this_machine_can_be_told_to_be_dead() -> None:
    own = Life.own()
    assert not own.is_over
    assert msgspec.structs.replace(own, began=own.began + 1).is_over  # its number is another's now
    assert not ELSEWHERE.is_over
