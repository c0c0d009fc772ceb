"""Every work item of every epoch is finished once and counted once, whatever the workers do."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.errors import UserError
from spartito.ps.protocol.work import Lease
from spartito.ps.scheduler.plan import BatchIndex, Plan
from spartito.ps.scheduler.queue import WorkQueue, WorkRange
from tests.ps.coordination import plan

Item = tuple[int, int, int]
"""(pass, step, slice)"""


def batches(plan: Plan, lengths: list[int]) -> list[list[tuple[int, int]]]:
    """(pass, step) of each global batch of each epoch, read one after another."""
    number, step = plan.start
    epochs = []
    for epoch in range(plan.epochs):
        before = plan.first_epoch_done if epoch == 0 else 0
        found: list[tuple[int, int]] = []
        while True:
            if plan.epoch_steps is not None and len(found) + before >= plan.epoch_steps:
                break
            if step >= lengths[number % len(lengths)]:
                number, step = number + 1, 0
                if plan.epoch_steps is None and number % (plan.passes_per_epoch or 1) == 0:
                    break
                continue
            found.append((number, step))
            step += 1
        epochs.append(found)
    return epochs


FAULTY_SECONDS = 30.0
"""After that the simulated world is at peace, so that it comes to an end."""


@dataclass
class Worker:
    """One that computes a lease in some ticks, or dies in the middle of it."""

    index: int
    ticks_per_item: float
    epoch: int = 0
    lease: Lease | None = None
    left: float = 0.0
    away: int = 0


@dataclass
class World:
    """Simulated workers on one queue; the stream's passes have these ``lengths``."""

    plan: Plan
    lengths: list[int]
    random: random.Random
    faults: float
    finished: Counter[Item] = field(default_factory=Counter)
    reopened: Counter[Item] = field(default_factory=Counter)
    groups: defaultdict[int, list[Lease]] = field(default_factory=lambda: defaultdict(list))
    now: float = 0.0

    def __post_init__(self) -> None:
        self.queue = WorkQueue(self.plan)
        speeds = [self.random.choice([0.01, 0.1, 0.3, 2.0]) for _ in range(self.plan.data_shards)]
        self.workers = [Worker(i, speed) for i, speed in enumerate(speeds)]
        self.closed = 0
        for worker in self.workers:
            self.queue.join(worker.index)

    def work_items(self, lease: Lease) -> tuple[list[Item], int | None]:
        """Those that exist, and the end of the pass if the worker ran into it."""
        length = self.lengths[lease.pass_ % len(self.lengths)]
        steps = range(lease.start, min(lease.stop, length))
        known = self.plan.steps_per_pass is not None
        ended = None if known or lease.stop <= length else length
        return [(lease.pass_, step, lease.data_shard) for step in steps], ended

    def run(self) -> None:
        for _ in range(20_000):
            self.now += 0.05
            for worker in self.workers:
                self.tick(worker)
            while self.closed < self.plan.epochs and self.queue.is_complete(self.closed):
                self.queue.close(self.closed)
                self.closed += 1
            idle = all(worker.lease is None for worker in self.workers)
            # Work items of the last epoch may be lost after it was complete.
            if self.queue.is_complete(self.plan.epochs) and idle:
                return
        raise AssertionError("the last epoch does not end")

    def tick(self, worker: Worker) -> None:
        if worker.away:
            worker.away -= 1
            return
        if self.now < FAULTY_SECONDS and self.random.random() < self.faults:
            self.fault(worker)
            return
        if worker.lease is None:
            self.ask(worker)
            return
        worker.left -= 0.05
        if worker.left <= 0:
            self.finish(worker)

    def ask(self, worker: Worker) -> None:
        while self.queue.is_complete(worker.epoch) and worker.epoch < self.plan.epochs - 1:
            worker.epoch += 1
        lease = self.queue.take(worker.index, worker.epoch, self.now)
        if lease is None:
            return
        self.check(worker, lease)
        worker.lease = lease
        worker.left = (lease.stop - lease.start) * worker.ticks_per_item
        self.groups[lease.group].append(lease)

    def check(self, worker: Worker, lease: Lease) -> None:
        assert 0 <= lease.start < lease.stop
        assert 0 <= lease.epoch < self.plan.epochs
        if self.plan.gated or self.plan.together:
            assert lease.epoch <= self.closed
        else:
            assert lease.epoch <= worker.epoch + 1

    def finish(self, worker: Worker) -> None:
        assert worker.lease is not None
        work_items, ended = self.work_items(worker.lease)
        sums = [float(len(work_items)), float(sum(step for _, step, _ in work_items))]
        if self.now < FAULTY_SECONDS and self.random.random() < self.faults:
            assert self.queue.abandon(worker.lease.id)
        elif self.queue.finish(worker.lease.id, sums, ended, self.now):
            self.finished.update(work_items)
        worker.lease = None

    def fault(self, worker: Worker) -> None:
        if self.random.random() < 0.5:
            held = self.queue.drop(worker.index)
            assert worker.lease is None or held == [worker.lease]
            if worker.lease is not None and self.random.random() < 0.5:
                lease = worker.lease  # a frozen worker comes back with what is no longer its own
                assert not self.queue.finish(lease.id, [1e9, 1e9], None, self.now)
            worker.lease, worker.away = None, self.random.randrange(30)
        elif self.finished:
            done = [
                work_item for work_item, n in self.finished.items() if n > self.reopened[work_item]
            ]
            lost = self.random.sample(done, min(len(done), self.random.randrange(1, 5)))
            ranges = [WorkRange(number, index, step, step + 1) for number, step, index in lost]
            assert self.queue.reopen(ranges) == len(lost)
            self.reopened.update(lost)


LENGTHS = st.lists(st.integers(1, 25), min_size=1, max_size=3)


@st.composite
def worlds(draw: st.DrawFn, faults: float = 0.02, together: bool | None = None) -> World:
    lengths = draw(LENGTHS)
    known = draw(st.booleans())
    lengths = lengths[:1] if known else lengths
    virtual = draw(st.none() | st.integers(1, 30))
    first = draw(st.integers(0, 3))
    made = Plan(
        data_shards=draw(st.integers(1, 4)),
        steps_per_pass=lengths[0] if known else None,
        passes_per_epoch=draw(st.integers(1, 3)),
        epoch_steps=virtual,
        epochs=draw(st.integers(1, 3)),
        start=(first, draw(st.integers(0, lengths[first % len(lengths)]))),
        first_epoch_done=0 if virtual is None else draw(st.integers(0, virtual)),
        gated=draw(st.booleans()),
        together=draw(st.booleans()) if together is None else together,
        multiple=draw(st.integers(1, 4)),
    )
    return World(made, lengths, random.Random(draw(st.integers())), faults)


def items_in(queue: WorkQueue) -> list[Item]:
    """All that was begun, one by one."""
    return [(w.pass_, step, w.data_shard) for w in queue.begun() for step in range(w.start, w.stop)]


@given(worlds())
@settings(max_examples=150)
def test_each_work_item_is_finished_and_counted_once(world: World) -> None:
    world.run()
    expected = batches(world.plan, world.lengths)
    for epoch, targets in enumerate(expected):
        work_items = [(*step, r) for step in targets for r in range(world.plan.data_shards)]
        for work_item in work_items:
            assert world.finished.pop(work_item) == 1 + world.reopened[work_item]
        if work_items:
            sums = [float(len(work_items)), float(sum(step for _, step, _ in work_items))]
            assert world.queue.sums(epoch) == sums
        assert world.queue.items_done(epoch) == len(work_items)
        assert world.queue.steps(epoch) == len(targets)
    assert not world.finished
    assert sorted(items_in(world.queue)) == sorted(
        (*step, r)
        for targets in expected
        for step in targets
        for r in range(world.plan.data_shards)
    )


@given(worlds(faults=0.0, together=True))
@settings(max_examples=60)
def test_a_group_covers_the_same_steps_of_all_slices(world: World) -> None:
    world.run()
    data_shards = world.plan.data_shards
    for group, leases in world.groups.items():
        assert group > 0
        assert sorted(lease.data_shard for lease in leases) == list(range(data_shards))
        assert len({(lease.pass_, lease.start, lease.stop) for lease in leases}) == 1
        length = leases[0].stop - leases[0].start
        assert leases[0].sizes == (length,) * data_shards
        assert [leases[0].parties(i) for i in (0, length - 1, length)] == [
            data_shards,
            data_shards,
            0,
        ]


@given(worlds(together=True))
@settings(max_examples=60)
def test_a_group_knows_its_sizes_when_workers_die(world: World) -> None:
    taken: defaultdict[int, list[Lease]] = defaultdict(list)
    grant = world.queue._lease

    def noted(*args: Any) -> Lease:
        lease = grant(*args)
        taken[lease.group].append(lease)
        return lease

    world.queue._lease = noted  # type: ignore[method-assign, assignment]
    world.run()
    for leases in taken.values():
        sizes = tuple(lease.stop - lease.start for lease in leases)
        assert all(lease.sizes == sizes for lease in leases)


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
