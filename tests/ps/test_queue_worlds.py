"""Work queues in worlds where workers die, are late and come back."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.ps.protocol.work import Lease
from spartito.ps.scheduler.plan import Plan
from spartito.ps.scheduler.queue import WorkQueue, WorkRange
from tests.ps.queues import Item, batches

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
        if not lease.counts:  # lost work comes first, of whatever epoch it is
            assert all(self.finished[work_item] for work_item in self.work_items(lease)[0])
        elif self.plan.gated or self.plan.together:
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
