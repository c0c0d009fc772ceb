"""Pushes of many workers become the updates that the rules say, in threads as on a server."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from spartito.ps.protocol.messages import Outcome
from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.timetable import Timetable
from tests.ps.bench import Bench, push

LIMIT = 60.0  # seconds that no passing test comes near

# One push, one update


def test_every_push_is_an_update_and_works_once() -> None:
    bench = Bench(Rules(2))
    assert bench.push(0, push(0, 0), 1.0) == Outcome.APPLIED
    assert bench.push(1, push(0, 1, examples=3), 2.0, 5.0) == Outcome.APPLIED
    assert bench.push(0, push(0, 1), 100.0) == Outcome.DUPLICATE
    assert bench.values() == [-3.0, -5.0]
    assert bench.count == 2
    assert bench.numbers() == (2, 2, 2, 7)
    assert bench.store.duplicates == 1
    assert bench.store.staleness.to_dict() == {"0": 1, "1": 1}
    assert bench.store.applied((1, 0, 0, 1))
    assert not bench.store.applied((1, 0, 1, 1))


def test_a_push_of_several_work_items_counts_them_all() -> None:
    bench = Bench(Rules(2))
    keys = [(1, 0, step, 1) for step in range(3)]
    assert bench.push(1, push(0, keys=keys, examples=12), 1.0) == Outcome.APPLIED
    assert bench.push(0, push(2, 1), 1.0) == Outcome.DUPLICATE
    assert bench.numbers() == (1, 1, 3, 12)


def test_a_dropped_push_counts_and_changes_nothing() -> None:
    bench = Bench(Rules(1))
    assert bench.push(0, push(0, dropped=True), float("nan")) == Outcome.APPLIED
    assert bench.values() == []
    assert bench.numbers() == (0, 1, 1, 4)
    assert bench.store.dropped == 1
    assert bench.push(0, push(0), 1.0) == Outcome.DUPLICATE


def test_options_hold_from_their_global_step_on() -> None:
    bench = Bench(Rules(2))  # two pushes are a global step
    with bench.store.lock:
        bench.store.schedule(Timetable(1, [[{"lr": 0.5}], [{"lr": 0.25}]]))
    expected = 0.0
    for step, rate in enumerate([0.5, 0.5, 0.25, 0.25]):
        for part in (0, 1):
            bench.push(part, push(step, part), 1.0)
            expected -= rate
    assert bench.values() == [expected]


# Stale pushes


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, -(1 + 1 + 1 / 2 + 1 / 3)),
        (1, -(1 + 1 + 1 / 2 + 1 / 3)),
        (2, -(1 + 1 + 1 + 2 / 3)),
        (3, -4.0),
    ],
)
def test_a_stale_push_moves_less_far(limit: int | None, expected: float) -> None:
    bench = Bench(Rules(1, limit, "scale"))
    for step in range(4):
        assert bench.push(0, push(step), 1.0) == Outcome.APPLIED
    assert bench.values() == pytest.approx([expected], rel=1e-12)
    assert bench.store.shard.optimizer.param_groups[0]["lr"] == 1.0


def test_a_push_beyond_the_bound_is_refused_until_it_is_fresh() -> None:
    bench = Bench(Rules(1, 1, "reject"))
    assert [bench.push(0, push(step), 1.0) for step in range(3)] == [
        Outcome.APPLIED,
        Outcome.APPLIED,
        Outcome.STALE,
    ]
    assert bench.values() == [-2.0]
    assert not bench.store.applied((1, 0, 2, 0))
    assert bench.store.refused == 1
    assert bench.push(0, push(2, pulled=1), 1.0) == Outcome.APPLIED
    assert bench.store.staleness.max == 1


# Several pushes, one update


@given(
    st.lists(st.tuples(st.integers(-8, 8), st.sampled_from([1.0, 2.0, 5.0])), max_size=9),
    st.integers(2, 4),
)
def test_pushes_are_put_together_by_weight(pushes: list[tuple[int, float]], size: int) -> None:
    bench = Bench(Rules(1, aggregate=size))
    expected = 0.0
    for start in range(0, len(pushes), size):
        part = pushes[start : start + size]
        for step, (number, weight) in enumerate(part, start):
            assert bench.push(0, push(step, weight=weight), float(number)) == Outcome.APPLIED
            assert bench.push(0, push(step, weight=weight), 99.0) == Outcome.DUPLICATE
        if len(part) < size:
            assert bench.numbers()[:3] == (start // size, start, start)
            with bench.store.lock:
                bench.store.flush()
        expected -= sum(number * weight for number, weight in part) / sum(w for _, w in part)
        assert sum(bench.values()) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    updates = -(-len(pushes) // size)
    assert bench.numbers() == (updates, len(pushes), len(pushes), 4 * len(pushes))
    assert bench.count == updates
    with bench.store.lock:
        bench.store.flush()
    assert bench.store.version == updates


def test_what_waits_to_be_put_together_is_not_in_a_snapshot() -> None:
    bench = Bench(Rules(1, aggregate=2))
    for step in range(3):
        bench.push(0, push(step), 1.0)
    assert bench.store.applied((1, 0, 2, 0))
    fresh = Bench(Rules(1, aggregate=2)).store
    fresh.restore(*bench.store.dump())
    assert [fresh.applied((1, 0, step, 0)) for step in range(3)] == [True, True, False]


def test_an_entry_is_absent_from_a_mean_if_it_is_from_all() -> None:
    bench = Bench(Rules(1, aggregate=2), momentum=0.5)
    bench.push(0, push(0, absent=[]), 4.0)
    bench.push(0, push(1, absent=[0, 1]))
    assert bench.values() == [-2.0]
    bench.push(0, push(2, absent=[0, 1]))
    bench.push(0, push(3, absent=[0, 1]))
    assert bench.values() == [-2.0]  # momentum would have moved it


# What a restarted server knows


@pytest.mark.parametrize(("kind", "options"), [(SGD, {"momentum": 0.9}), (Adam, {"lr": 0.1})])
@pytest.mark.parametrize("rules", [Rules(2), Rules(2, aggregate=2), Rules(2, 2, "scale")])
def test_a_restored_store_goes_on_with_the_same_bits(
    kind: type[Optimizer], options: dict[str, Any], rules: Rules
) -> None:
    one, other = (Bench(rules, kind=kind, **options) for _ in range(2))
    one.store.job = "ours"
    one.store.schedule(Timetable(0, [[{"lr": 0.3}]]))
    one.push(0, push(0), 0.1, 0.7)
    one.push(1, push(0, 1, dropped=True))
    one.push(1, push(1, 1), 0.3)
    one.push(0, push(0), 0.3)
    one.store.lost = 5
    tensors, about = one.store.dump()
    before: dict[str, Tensor] = {name: tensor.clone() for name, tensor in tensors.items()}
    other.store.ready = False
    other.store.restore(tensors, about)
    assert other.store.ready
    assert other.store.job == "ours"
    assert other.numbers() == one.numbers()
    assert other.store.staleness == one.store.staleness
    for name in ("duplicates", "dropped", "refused", "lost"):
        assert getattr(other.store, name) == getattr(one.store, name)
    for step in range(2, 6):
        for bench in (one, other):
            assert bench.push(0, push(step, pulled=step - 1), 0.1 * step, -1.0) == Outcome.APPLIED
            assert bench.push(0, push(1, 1), 5.0) == Outcome.DUPLICATE
        assert torch.equal(one.store.shard.values, other.store.shard.values)
    again = one.store.dump()[0]
    assert before.keys() == again.keys()
    assert not torch.equal(before["values"], again["values"])  # it was a copy


def test_another_job_begins_with_nothing_known() -> None:
    bench = Bench(Rules(1, 1))
    with bench.store.lock:
        bench.store.begin("first")
        bench.store.admit(0)
    bench.push(0, push(0), 1.0)
    with bench.store.lock:
        bench.store.begin("first")  # other values for the same job
    assert bench.numbers() == (1, 1, 1, 4)
    with bench.store.lock:
        bench.store.admit(0)
        bench.store.begin("second")
    assert bench.numbers() == (0, 0, 0, 0)
    assert not bench.store.applied((1, 0, 0, 0))
    assert bench.store.staleness.total == 0
    assert bench.push(0, push(0), 1.0) == Outcome.STALE  # it pulled in the other job
