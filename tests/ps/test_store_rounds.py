"""Rounds: one push of every member makes an update."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.ps.protocol.messages import Outcome
from spartito.ps.protocol.rules import Rules
from tests.ps.bench import Bench, push, results, round_of, threads, wait_until, waits_in

LIMIT = 60.0  # seconds that no passing test comes near


@settings(max_examples=40)
@given(
    rounds=st.lists(
        st.lists(
            st.tuples(
                st.integers(-8, 8),
                st.sampled_from([1.0, 3.0]),
                st.sampled_from(["push", "push", "push", "drop", "die", "push and die"]),
            ),
            min_size=3,
            max_size=3,
        ),
        max_size=5,
    )
)
def test_a_round_is_the_mean_of_who_came(rounds: list[list[tuple[int, float, str]]]) -> None:
    bench = Bench(Rules(3, 0))
    live, expected, work_items = {0, 1, 2}, 0.0, 0
    with threads() as pool:
        for index, members in enumerate(rounds):
            here = [(w, *members[w]) for w in sorted(live)]
            coming = [
                pool.submit(
                    bench.push,
                    worker,
                    push(index, worker, weight=weight, group=1, index=index, parties=3,
                         dropped=what == "drop"),
                    float(number),
                )
                for worker, number, weight, what in here
                if what != "die"
            ]  # fmt: skip
            for worker, _, _, what in here:
                if what == "die":
                    live.discard(worker)
                    with bench.store.lock:
                        bench.store.lose(worker, 1, len(rounds))
            assert set(results(coming)) <= {Outcome.APPLIED}
            good = [(number, weight) for _, number, weight, what in here if what[:4] == "push"]
            if good:
                expected -= sum(n * w for n, w in good) / sum(w for _, w in good)
            assert sum(bench.values()) == pytest.approx(expected, rel=1e-12, abs=1e-12)
            work_items += len(coming)
            assert bench.numbers()[1:] == (work_items, work_items, 4 * work_items)
            for worker, _, _, what in here:
                if what == "push and die":
                    live.discard(worker)
                    with bench.store.lock:
                        bench.store.lose(worker, 1, len(rounds))
            if not live:
                break
    assert set(bench.store.staleness.to_dict()) <= {"0"}


def test_a_mean_has_the_same_bits_in_whatever_order_its_pushes_come(
    pool: ThreadPoolExecutor,
) -> None:
    found = set()
    for order in permutations(range(3)):
        bench = Bench(Rules(3, 0))
        coming = []
        for worker in order:
            told = push(0, worker, group=1, index=0, parties=3, weight=1.0 + worker)
            coming.append(pool.submit(bench.push, worker, told, 0.1 * (worker + 1), 1e16**worker))
            if len(coming) < 3:
                wait_until(bench, partial(waits_in, bench, worker))
        assert results(coming) == [Outcome.APPLIED] * 3
        found.add(tuple(bench.values()))
    assert len(found) == 1


def test_a_push_that_is_said_again_counts_once_in_its_round(pool: ThreadPoolExecutor) -> None:
    bench = Bench(Rules(2, 0))
    first = pool.submit(bench.push, 0, round_of(0), 4.0)
    wait_until(bench, lambda: waits_in(bench, 0))
    again = pool.submit(bench.push, 0, round_of(0), 4.0)  # by a new connection
    wait_until(bench, lambda: bench.store.duplicates == 1)
    assert bench.push(1, round_of(1), 2.0) == Outcome.APPLIED
    assert results([first, again]) == [Outcome.APPLIED, Outcome.DUPLICATE]
    assert bench.values() == [-3.0]
    assert bench.numbers() == (1, 2, 2, 8)


def test_a_push_that_is_said_again_after_its_round_waits_for_nobody(
    pool: ThreadPoolExecutor,
) -> None:
    bench = Bench(Rules(2, 0))
    first = pool.submit(bench.push, 0, round_of(0), 4.0)
    bench.push(1, round_of(1), 2.0)
    assert results([first]) == [Outcome.APPLIED]
    assert results([pool.submit(bench.push, 0, round_of(0), 4.0)]) == [Outcome.DUPLICATE]
    assert bench.values() == [-3.0]
    later = pool.submit(bench.push, 0, round_of(0, 1), 1.0)
    bench.push(1, round_of(1, 1), 1.0)
    assert results([later]) == [Outcome.APPLIED]
    assert bench.values() == [-4.0]


def test_another_stream_has_groups_of_the_same_numbers(pool: ThreadPoolExecutor) -> None:
    bench = Bench(Rules(2, 0))
    for stream in (1, 2):
        keys = [[(stream, 0, 0, worker)] for worker in range(2)]
        first = pool.submit(bench.push, 0, round_of(0, keys=keys[0]), 4.0)
        assert bench.push(1, round_of(1, keys=keys[1]), 2.0) == Outcome.APPLIED
        assert results([first]) == [Outcome.APPLIED]
    assert bench.values() == [-6.0]


def test_known_work_items_make_up_a_round_with_unknown_ones(pool: ThreadPoolExecutor) -> None:
    """As when another server has forgotten some of them, and all is computed again."""
    bench = Bench(Rules(2, 0))
    with bench.store.lock:
        bench.store.lose(1, 1, 1)
    assert bench.push(0, round_of(0), 4.0) == Outcome.APPLIED
    known = pool.submit(bench.push, 0, round_of(0, group=2), 99.0)
    assert bench.push(1, round_of(1, group=2), 2.0) == Outcome.APPLIED
    assert results([known]) == [Outcome.DUPLICATE]
    assert bench.values() == [-6.0]
    assert bench.numbers() == (2, 2, 2, 8)


def test_who_was_given_up_is_told_that_the_others_went_on(pool: ThreadPoolExecutor) -> None:
    bench = Bench(Rules(2, 0))
    waiting = pool.submit(bench.push, 0, round_of(0), 4.0)
    with bench.store.lock:
        bench.store.lose(1, 1, 3)
    assert results([waiting]) == [Outcome.APPLIED]
    assert bench.push(1, round_of(1), 2.0) == Outcome.EXPIRED
    assert bench.values() == [-4.0]
    assert not bench.store.applied((1, 0, 0, 1))


def test_who_has_no_work_item_in_a_round_is_not_missed(pool: ThreadPoolExecutor) -> None:
    bench = Bench(Rules(3, 0))
    with bench.store.lock:
        bench.store.lose(2, 1, 1)  # its lease had one work item: the second round never was its
    waiting = pool.submit(bench.push, 0, round_of(0, 1), 4.0)
    wait_until(bench, lambda: waits_in(bench, 0))
    assert not waiting.done()
    assert bench.push(1, round_of(1, 1), 2.0) == Outcome.APPLIED
    assert results([waiting]) == [Outcome.APPLIED]
    assert bench.values() == [-3.0]


def test_the_mean_of_a_round_is_clipped() -> None:
    bench = Bench(Rules(1, 0, clip_norm=1.0))
    assert bench.push(0, push(0, group=1, parties=1), 3.0, 4.0) == Outcome.APPLIED
    assert bench.values() == pytest.approx([-0.6, -0.8], rel=1e-6)
