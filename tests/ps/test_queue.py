"""Every work item of every epoch is finished once and counted once, whatever the workers do."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.errors import UserError
from spartito.ps.protocol.work import Lease
from spartito.ps.scheduler.plan import BatchIndex, Plan
from spartito.ps.scheduler.queue import WorkQueue, WorkRange
from tests.ps.coordination import plan
from tests.ps.queues import batches
from tests.ps.test_queue_worlds import LENGTHS, items_in


def test_a_worker_prefers_its_own_slice_and_helps_with_another() -> None:
    queue = WorkQueue(plan(data_shards=2, steps_per_pass=2))
    taken = []
    for _ in range(4):
        lease = queue.take(1, 0, 0.0)
        assert lease is not None
        taken.append(lease.data_shard)
        queue.finish(lease.id, [], None, 1.0)
    assert taken == [1, 1, 0, 0]
    assert queue.is_complete(0)
    assert queue.take(1, 0, 2.0) is None


def lengths(queue: WorkQueue, seconds_per_item: float, worker: int = 0) -> list[int]:
    """The lengths of the leases that one worker gets until there are no more."""
    found, now = [], 0.0
    while (lease := queue.take(worker, 0, now)) is not None:
        found.append(lease.stop - lease.start)
        now += found[-1] * seconds_per_item
        queue.finish(lease.id, [], None, now)
    return found


def test_leases_grow_to_a_second_and_shrink_at_the_end() -> None:
    found = lengths(WorkQueue(plan(data_shards=1, steps_per_pass=1000)), 0.02)
    assert found[:6] == [1, 2, 4, 8, 16, 32]
    assert max(found) in (49, 50)
    left = 1000
    for length in found:
        assert length <= max(1, left // 4)
        left -= length
    assert left == 0


def test_lengths_are_multiples_but_for_the_end() -> None:
    found = lengths(WorkQueue(plan(data_shards=1, steps_per_pass=50, multiple=4)), 0.02)
    assert found[0] == 4
    assert all(length % 4 == 0 for length in found[:-1])
    assert found[-1] == 2


def test_ungated_work_of_the_next_epoch_begins_but_no_further() -> None:
    queue = WorkQueue(plan(data_shards=1, steps_per_pass=1, epochs=3))
    first = queue.take(0, 0, 0.0)
    second = queue.take(1, 0, 0.0)
    assert first is not None
    assert second is not None
    assert (first.epoch, second.epoch) == (0, 1)
    assert queue.take(2, 0, 0.0) is None


def test_gated_work_waits_for_the_close() -> None:
    queue = WorkQueue(plan(data_shards=1, steps_per_pass=1, epochs=2, gated=True))
    first = queue.take(0, 0, 0.0)
    assert first is not None
    assert queue.take(1, 0, 0.0) is None
    assert not queue.is_complete(0)
    queue.finish(first.id, [], None, 1.0)
    assert queue.is_complete(0)
    assert queue.take(0, 1, 1.0) is None
    queue.close(0)
    second = queue.take(0, 1, 1.0)
    assert second is not None
    assert second.epoch == 1


def test_lost_work_of_a_closed_epoch_come_first_and_count_no_more() -> None:
    queue = WorkQueue(plan(data_shards=1, steps_per_pass=2, epochs=2, gated=True))
    for _ in range(2):
        lease = queue.take(0, 0, 0.0)
        assert lease is not None
        queue.finish(lease.id, [1.0], None, 0.0)
    queue.close(0)
    assert queue.reopen([WorkRange(0, 0, 1, 2)]) == 1
    assert queue.frontier() == (0, 1)
    again = queue.take(0, 1, 0.0)
    assert again is not None
    assert (again.epoch, again.pass_, again.start, again.stop) == (0, 0, 1, 2)
    assert not again.counts
    queue.finish(again.id, [1.0], None, 0.0)
    assert queue.sums(0) == [2.0]
    assert queue.frontier() == (1, 0)


@pytest.mark.parametrize(
    ("shape", "epochs"),
    [
        ({"steps_per_pass": 2}, [0, 1, 2]),
        ({"steps_per_pass": 2, "epoch_steps": 6, "epochs": 1}, [0, 0, 0]),
        ({"steps_per_pass": 6, "epoch_steps": 2}, [0, 1, 2]),
    ],
)
def test_a_range_of_lost_work_is_of_one_pass_and_one_epoch(
    shape: dict[str, int], epochs: list[int]
) -> None:
    made = plan(**{"data_shards": 1, "epochs": 3, "multiple": 8, "fixed_length": True} | shape)
    queue = WorkQueue(made)
    for epoch in epochs:
        lease = queue.take(0, epoch, 0.0)
        assert lease is not None
        queue.finish(lease.id, [1.0], None, 0.0)
        if queue.is_complete(epoch):
            queue.close(epoch)
    first, *others = queue.begun()
    assert queue.reopen([first._replace(start=1), *others]) == 5
    found = []
    while (again := queue.take(0, 0 if made.epochs == 1 else 2, 1.0)) is not None:
        found.append((again.epoch, again.stop - again.start))
        queue.finish(again.id, [1.0], None, 1.0)
    assert found == list(zip(epochs, [1, 2, 2], strict=True))


def test_work_lost_while_their_lease_is_out_come_after_it() -> None:
    queue = WorkQueue(plan(data_shards=1, steps_per_pass=8, multiple=4))
    out = queue.take(0, 0, 0.0)
    assert out is not None
    lost = [WorkRange(0, 0, 2, 3), WorkRange(0, 0, 6, 8), WorkRange(5, 0, 0, 4)]
    assert queue.reopen(lost) == 1  # only the first was begun
    queue.finish(out.id, [4.0], None, 1.0)
    again = queue.take(1, 0, 1.0)
    assert again is not None
    assert (again.start, again.stop, again.counts) == (2, 3, False)
    assert queue.frontier() == (0, 2)
    assert (0, 3, 0) in items_in(queue)


def test_a_dropped_lease_is_the_next_one_given() -> None:
    queue = WorkQueue(plan(data_shards=1, multiple=3))
    out = queue.take(4, 0, 0.0)
    assert out is not None
    assert queue.held() == [(4, out)]
    assert queue.expired(5.0, 4.0) == [(4, out)]
    assert queue.expired(5.0, 5.0) == []
    assert queue.drop(4) == [out]
    assert queue.drop(4) == []
    assert not queue.abandon(out.id)
    assert queue.held() == []
    again = queue.take(0, 0, 6.0)
    assert again is not None
    assert (again.start, again.stop) == (out.start, out.stop)


def test_batches_that_are_done_were_there_whatever_end_is_found() -> None:
    queue = WorkQueue(plan(steps_per_pass=None))
    for worker, ended in ((0, None), (1, None), (0, None), (1, 2)):
        lease = queue.take(worker, 0, 0.0)
        assert lease is not None
        assert lease.data_shard == worker
        queue.finish(lease.id, [], ended, 0.0)
    assert queue.steps(0) == 3
    assert queue.is_complete(0)


def test_a_stream_that_is_empty_says_so() -> None:
    queue = WorkQueue(plan(steps_per_pass=None))
    lease = queue.take(0, 0, 0.0)
    assert lease is not None
    with pytest.raises(UserError, match="no examples"):
        queue.finish(lease.id, [], 0, 1.0)


@pytest.mark.parametrize(
    "changes",
    [{"passes_per_epoch": None}, {"data_shards": 0}, {"epochs": -1}, {"epoch_steps": 0}],
)
def test_a_plan_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"epoch without|no such plan"):
        plan(**changes)


@given(LENGTHS, st.integers(1, 3), st.none() | st.integers(1, 30), st.integers(0, 4))
def test_the_course_reads_the_passes_in_order(
    lengths: list[int], repeats: int, virtual: int | None, start: int
) -> None:
    made = plan(
        steps_per_pass=lengths[0],
        passes_per_epoch=repeats,
        epoch_steps=virtual,
        epochs=3,
        start=(start, 0),
    )
    course, batch = BatchIndex(made), 0
    for epoch, targets in enumerate(batches(made, lengths[:1])):
        for target in targets:
            assert course.locate(batch) == target
            assert course.find(*target) == batch
            assert course.epoch(batch) == epoch
            batch += 1
        assert course.stop(epoch) == batch


@given(
    st.integers(1, 9), st.integers(1, 3), st.none() | st.integers(1, 11), st.integers(1, 3),
    st.integers(0, 60), st.integers(0, 1 << 30),
)  # fmt: skip
def test_who_goes_on_makes_the_updates_that_are_left(
    steps: int, repeats: int, virtual: int | None, multiple: int, moves: int, seed: int
) -> None:
    """From any moment on, with any epoch: as many as without the interruption."""
    chance, held = random.Random(seed), dict[int, Lease]()
    whole = Plan(2, steps, None if virtual else repeats, virtual, 3, multiple=multiple)
    queue = WorkQueue(whole)
    for _ in range(moves):
        worker = chance.randrange(3)
        if (lease := held.pop(worker, None)) is not None:
            queue.finish(lease.id, [], None, 0.0)
        elif (lease := queue.take(worker, 2, 0.0)) is not None:
            held[worker] = lease
    every = BatchIndex(whole)
    for epoch in range(3):
        if epoch and not queue.is_complete(epoch - 1):
            break
        found = queue.settled(epoch)
        rest = BatchIndex(
            replace(whole, start=found[:2], first_epoch_done=found.done, epochs=3 - epoch)
        )
        assert found.updates + rest.updates(rest.stop(2)) == every.updates(every.stop(2))
