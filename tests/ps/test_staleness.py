"""No push is staler than the limit, and somebody can always go on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.ps.protocol.histogram import Histogram
from spartito.ps.server.staleness import Gate

EVENTS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["go", "go", "go", "die"])))


@given(limit=st.integers(0, 6), workers=st.integers(1, 6), events=EVENTS)
def test_pushes_are_never_too_stale_and_nobody_waits_for_nothing(
    limit: int, workers: int, events: list[tuple[int, str]]
) -> None:
    gate, version = Gate(limit), 0
    pulled: dict[int, int] = {}
    asked: list[int] = []
    for number, event in events:
        worker = number % workers
        if event == "die":
            gate.release(worker)
            pulled.pop(worker, None)
            asked = [other for other in asked if other != worker]
        elif worker in pulled:
            staleness = version - pulled.pop(worker)
            assert staleness <= limit
            assert gate.push(worker) == staleness
            version += 1
        elif worker not in asked:
            gate.ask(worker)
            asked.append(worker)
        ready = gate.grantable()
        assert ready == asked[: len(ready)]
        assert ready or pulled or not asked
        for other in ready:
            gate.grant(other, version)
            pulled[other] = version
            asked.remove(other)
        assert gate.grantable() == []
        assert [gate.holds(w) for w in range(workers)] == [w in pulled for w in range(workers)]


@given(limit=st.integers(0, 5), workers=st.integers(1, 8))
def test_as_many_may_compute_as_the_limit_lets(limit: int, workers: int) -> None:
    gate = Gate(limit)
    for worker in range(workers):
        gate.ask(worker)
    assert gate.grantable() == list(range(min(workers, limit + 1)))


def test_a_slow_worker_holds_the_others_until_it_pushes_or_dies() -> None:
    gate = Gate(1)
    gate.ask(0)
    gate.grant(0, 7)
    gate.ask(1)
    gate.grant(1, 7)
    assert gate.push(1) == 0
    gate.ask(1)
    assert gate.grantable() == []
    with pytest.raises(ValueError, match="may not pull"):
        gate.grant(1, 8)
    gate.release(0)
    with pytest.raises(ValueError, match="no outstanding pull"):
        gate.push(0)
    assert gate.grantable() == [1]


def test_asking_again_gives_up_what_was_pulled() -> None:
    gate = Gate(0)
    gate.ask(0)
    gate.grant(0, 0)
    gate.ask(0)
    assert not gate.holds(0)
    assert gate.grantable() == [0]


def test_a_negative_limit() -> None:
    with pytest.raises(ValueError, match="-1"):
        Gate(-1)


@given(st.lists(st.integers(0, 20)), st.lists(st.integers(0, 20)))
def test_a_histogram_counts(one: list[int], other: list[int]) -> None:
    counted, more = Histogram(), Histogram()
    for staleness in one:
        counted.add(staleness)
    for staleness in other:
        more.add(staleness)
    counted.merge(more)
    together = one + other
    assert counted.total == len(together)
    assert counted.max == max(together, default=0)
    assert counted.mean == pytest.approx(sum(together) / max(1, len(together)))
    assert Histogram.from_dict(counted.to_dict()) == counted
    assert list(counted.to_dict()) == [str(s) for s in sorted(set(together))]
