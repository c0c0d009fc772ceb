"""Between machines gradients leave while backward runs; the numbers are those without."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spartito.engine.gradients.overlap_trial import AGAIN, SETTLING, TURN, OverlapTrial
from spartito.engine.gradients.streamed_gradients import BUCKET, cut
from spartito.wire.ports import free_port
from tests.collectives.group import running
from tests.replicas import Replicas
from tests.strategies import overlap_jobs as jobs

WAYS = [("sockets", 3), ("layers", 4)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from("ab")), max_size=20),
    st.integers(1, 60),
    st.randoms(),
)
def test_each_tensor_is_in_one_bucket_in_order(
    tensors: list[tuple[int, str]], limit: int, random: Any
) -> None:
    order = list(range(len(tensors)))
    random.shuffle(order)
    nbytes, kinds = [size for size, _ in tensors], [kind for _, kind in tensors]
    buckets = cut(order, nbytes, kinds, limit)
    assert Counter(member for bucket in buckets for member in bucket) == Counter(order)
    rest = [b for b in buckets if sum(nbytes[member] for member in b) < limit]
    assert buckets[len(buckets) - len(rest) :] == rest  # complete ones come first
    assert len({kinds[bucket[0]] for bucket in rest}) == len(rest)
    for bucket in buckets:
        assert len({kinds[member] for member in bucket}) == 1
        assert [member for member in order if member in bucket] == bucket
        assert sum(nbytes[member] for member in bucket[:-1]) < limit


@pytest.mark.parametrize(("way", "size"), WAYS)
@pytest.mark.parametrize(
    "given",
    [{}, {"accumulate": 2, "clip_norm": 0.3}, {"deterministic": True}, {"precision": "bf16"}],
    ids=["plain", "accumulate", "deterministic", "bf16"],
)
def test_a_fit_has_the_bits_of_one_sum_at_the_end(
    replicas: Replicas, way: str, size: int, given: dict[str, Any]
) -> None:
    whole = replicas(jobs.fit, size, way, {"bucket_bytes": jobs.LARGE}, **given)
    parts = replicas(jobs.fit, size, way, {"bucket_bytes": jobs.SMALL}, **given)
    for (expected, none), (found, early) in zip(whole, parts, strict=True):
        assert none == 0
        assert early > 0
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("way", "size"), WAYS)
def test_a_loop_may_change_what_has_left(replicas: Replicas, way: str, size: int) -> None:
    whole = replicas(jobs.loop, size, way, jobs.LARGE)
    parts = replicas(jobs.loop, size, way, jobs.SMALL)
    for (expected, *_), (found, early, rests) in zip(whole, parts, strict=True):
        assert early > 0
        assert rests == 15  # four changes, each of which was noticed: 1, 3, 7, 15
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("way", "size"), WAYS)
def test_what_is_faster_is_found_out_together(replicas: Replicas, way: str, size: int) -> None:
    """All replicas go the same way after each of several trials; the bits are those of either."""
    whole = replicas(jobs.finding_out, size, way, jobs.LARGE, 22)
    tried = replicas(jobs.finding_out, size, way, None, 22)
    assert len({overlaps for *_, overlaps in tried}) == 1
    for (expected, none, _), (found, early, _) in zip(whole, tried, strict=True):
        assert none == 0
        assert early > 0
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_with_codes_too_numbers_do_not_depend_on_the_trial(replicas: Replicas) -> None:
    """Where a sum is in fewer bits, and what it leaves out comes later."""
    fixed = replicas(jobs.finding_out, 2, "sockets", BUCKET, 22, compress="4bit")
    tried = replicas(jobs.finding_out, 2, "sockets", None, 22, compress="4bit")
    for (expected, *_), (found, *_) in zip(fixed, tried, strict=True):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(0, 2))
def test_the_faster_way_is_taken_until_the_next_trial(
    beside: float, after: float, seldom: int
) -> None:
    """Also where the first updates of each way are slow, others too, and some say nothing."""
    trial, settled, taken = OverlapTrial(), 0, []
    for update in range(2 * AGAIN):
        way = trial.overlaps
        taken.append(way)
        slow = update % TURN < SETTLING or update % TURN == 4
        took = (beside if way else after) * (100 if slow else 1)
        if trial.count(None if update % TURN < seldom else took, way):
            settled += 1
            assert trial.found == (beside <= after)
            trial.settle(trial.found)
    assert settled == 2
    for first in (0, AGAIN):
        assert taken[first : first + 2 * TURN] == [True] * TURN + [False] * TURN
        assert set(taken[first + 2 * TURN : first + AGAIN]) == {beside <= after}


def test_what_cannot_be_compared_stays_as_it_is() -> None:
    """Where nothing may leave beside backward, as with two models that take turns."""
    trial = OverlapTrial()
    over = [trial.count(1.0, overlapped=False) for _ in range(2 * TURN)]
    assert over == [False] * (2 * TURN - 1) + [True]
    assert trial.found


@pytest.mark.parametrize("how", ["error", "kill"])
def test_who_fails_in_backward_is_named(how: str) -> None:
    port = free_port()
    with running() as group:
        for rank in (0, 1):
            group.start(rank, jobs.fail, port, how)
        kind, text, _, threads = group.result(0)
        assert kind == "TaskLostError"
        assert text.startswith("worker 1 is gone")
        assert threads == 0
        if how == "error":
            kind, text, early, threads = group.result(1)
            assert (kind, text, threads) == ("ValueError", "in backward", 0)
            assert early > 0
