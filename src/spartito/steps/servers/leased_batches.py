"""A worker's batches under a parameter server: the work items that the coordinator leases to it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from spartito.data.batch import Batch
from spartito.data.dataset import Dataset
from spartito.data.reading.loader import Loader, check_divides, used_up
from spartito.data.reading.placing import Placing
from spartito.data.source import PerWorker, Source
from spartito.engine.devices.denormals import Denormals
from spartito.errors import SpartitoError, UserError
from spartito.heartbeat import resume, waits
from spartito.ps.chief import Chief
from spartito.ps.protocol.work import NOWHERE, Complete, Lease, Pause, Reached, Report, WorkSource
from spartito.ps.scheduler.plan import Plan
from spartito.ps.scheduler.readings import Halfway
from spartito.steps.batches import WAITING
from spartito.steps.distributed import Distributed, Figures, StepResult
from spartito.steps.servers.coordination import LeasedCoordination
from spartito.steps.servers.lease_readers import IndexedReader, Reader, StreamReader
from spartito.steps.servers.push import Pusher, WorkPosition

NO_EPOCH = -1  # is always complete: no work is given for it
WATCH_SECONDS = 0.1  # between two looks of a chief that computes nothing


class Computer(Protocol):
    """What the batches need to know of the strategy that computes them."""

    denormals: Denormals

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def coordination(self) -> LeasedCoordination:
        """What the tasks agree on."""
        ...

    @property
    def in_groups(self) -> bool:
        """Whether there are groups of several members."""
        ...

    @property
    def num_replicas(self) -> int:
        """How many tasks compute."""
        ...

    def plan(self, chain: Dataset, count: int, steps: int | None) -> Plan:
        """How a stream is divided into work items."""
        ...

    def follow(self) -> None:
        """Before an epoch: take in what was put into the model."""
        ...

    def enter(self, batch: Batch) -> None:
        """Announce the next batch."""
        ...


class NoFigures(Figures):
    """Those of a custom loop."""

    def sums(self) -> list[float]:
        return []

    def take(self) -> bytes:
        return b""

    def show(self) -> bytes:
        return b""


class Leased(Distributed):
    """Batches of the leases that this task gets: none on a chief that computes nothing."""

    overlaps = True
    alike = False

    def __init__(self, computer: Computer, chain: Dataset, seed: int) -> None:
        if isinstance(chain.source, PerWorker):
            raise UserError(
                "per_worker data under parameter_server, where any task may get any part",
                "Use a data set that every task can read, or a synchronous strategy.",
            )
        given = used_up(chain)
        if given is not None:
            raise UserError(
                f"a {type(given).__name__} under parameter_server, where any part of the data "
                "may be read again",
                "Give what can be iterated again: arrays, a DataLoader, or an object "
                "with __iter__.",
            )
        self._computer, self._chain = computer, chain
        self._placing = Placing(computer.device)
        self._coordination = computer.coordination
        slices = self._coordination.shards
        check_divides(chain, computer.num_replicas)
        Loader(chain, (0, computer.num_replicas), seed)  # refuses what has no batch
        kind = IndexedReader if isinstance(chain.source, Source) else StreamReader
        self._reader: Reader = kind(chain, slices, seed, self._coordination.member)
        self._start = (0, 0)
        self._stream: int | None = None
        self._epoch = self._last = 0
        self.waited = 0.0
        self._partial: list[float] = []  # of a lease that was left in the middle
        self._partial_metrics: list[bytes] = []
        self._reported: Sequence[float] = ()  # the sums of this epoch, up to the present lease
        self._shown = b""  # the metrics before the batches of an update that is not made yet
        self._drawn = 0  # of the pass of the lease, if it has a batch
        self._looked = (-1, -1)  # the lease and step of what `_halfway` found
        self._found: Halfway | None = None

    def __iter__(self) -> Generator[Batch]:
        for batches in self.epochs(1, None, 0):
            yield from batches
            for _ in self.watch():
                pass
        self._look()

    def epochs(
        self, count: int, steps: int | None, done: int, figures: Figures | None = None
    ) -> Generator[Generator[Batch]]:
        epochs = self._epochs(count, steps, done, figures or NoFigures())
        return self._computer.denormals.during(epochs)

    def _epochs(
        self, count: int, steps: int | None, done: int, figures: Figures
    ) -> Generator[Generator[Batch]]:
        coordination, chief = self._coordination, self._coordination.chief
        stream, first = coordination.next_stream()
        if chief is not None:
            coordination.announce_options()  # before anybody pushes
            plan = self._computer.plan(self._chain, count, steps)
            chief.open(stream, replace(plan, start=self._start, first_epoch_done=done))
            if first:
                chief.coordinator.close_epoch(stream, first - 1)
        self._stream, self._last = stream, first + count - 1
        try:
            for epoch in range(first, first + count):
                self._epoch, self._partial, self._partial_metrics = epoch, [], []
                yield self._run_epoch(stream, epoch, figures)
                if chief is not None:
                    chief.coordinator.close_epoch(stream, epoch)
        finally:
            if chief is not None and not self._was_left:
                self._start = chief.coordinator.frontier(stream)
                chief.end_stream(stream)
            self._stream = None
            self._reader.close()

    def total(self, shared: Sequence[float], own: Sequence[float]) -> list[float]:
        mine = [*shared, *own]
        chief = self._coordination.chief
        if chief is None or self._stream is None:
            return mine
        if found := self._halfway():
            parts = [found.sums, *found.others, _since(mine, self._reported)]
        else:
            parts = [chief.coordinator.sums(self._stream, self._epoch).sums, self._partial]
            if self._is_met:
                parts.append(_since(mine, self._reported))
        return [sum(column) for column in zip([0.0] * len(mine), *filter(None, parts), strict=True)]

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def collect(self, own: bytes) -> list[bytes]:
        chief = self._coordination.chief
        if chief is None or self._stream is None:
            return [own]
        if found := self._halfway():
            pusher = self._coordination.computing
            waits = pusher.pair.passes > 0  # batches of an update that is not made yet
            return [*sorted(found.metrics), self._shown if waits else own]
        reported = chief.coordinator.sums(self._stream, self._epoch).metrics
        if self._computer.in_groups:  # a report has the metrics of all members
            reported = [part for each in reported if each for part in _members(each)]
        here = self._coordination.metrics_inside(own) if self._is_met else []
        return [*sorted(reported), *self._partial_metrics, *here]  # in whatever order they came

    def order(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        number, step = self._where()
        return {"pass": number, "step": step}

    def settled(self, step: int, done: int, ended: bool) -> tuple[dict[str, Any], int, int]:
        chief = self._coordination.chief
        if chief is None or self._stream is None or self._halfway():
            return self.state_dict(), step, done
        met, self._coordination.met = self._coordination.met, NOWHERE
        here = met[1:] if met[0] == self._stream else None
        found = chief.coordinator.settled(self._stream, self._epoch + ended, here)
        step += found.updates - self._coordination.counted
        return {"pass": found.pass_, "step": found.step}, step, found.done

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if waiting := state.get(WAITING):
            raise UserError(
                f"the checkpoint was written after {waiting} batches of an update, which "
                "parameter_server cannot go on with: any worker may get the others",
                "Save after an update, or begin a whole epoch: fit(..., initial_epoch=N).",
            )
        self._start = state["pass"], state["step"]

    def _where(self) -> tuple[int, int]:
        """The first global batch that is not done, as far as the chief knows."""
        chief, current = self._coordination.chief, self._current
        if chief is None or self._stream is None:
            return self._start
        if current is not None and self._halfway():  # all are at the same step
            return current.lease.pass_, current.first
        return chief.coordinator.frontier(self._stream)

    @property
    def _current(self) -> WorkPosition | None:
        """What is computed now."""
        pusher = self._coordination.pusher
        return pusher.current if pusher else None

    def _halfway(self) -> Halfway | None:
        """In the middle of leases that all workers have, all at one step: what was done of them."""
        chief, current = self._coordination.chief, self._current
        if chief is None or self._stream is None or current is None or not current.lease.group:
            return None
        at = current.lease.id, current.first
        if self._looked != at:
            self._looked, self._found = at, chief.coordinator.halfway(self._stream, *at)
        return self._found

    def watch(self) -> Iterator[StepResult]:
        chief, stream, epoch = self._coordination.chief, self._stream, self._epoch
        if chief is None or stream is None or self._coordination.work is not None:
            return
        while True:
            while not chief.coordinator.poll(stream, epoch, WATCH_SECONDS):
                self._coordination.announce_options()
                yield self._coordination.progress()
            if self._is_settled(chief, stream, epoch):
                return

    @property
    def _was_left(self) -> bool:
        """Whether the strategy is closed, as at the end of a script: nobody is there to be told."""
        return self._coordination.pusher is None

    @property
    def _is_met(self) -> bool:
        """Whether a checkpoint is after the lease that we have, which we have not reported yet."""
        current = self._current
        if current is None or not current.lease.counts or current.first != current.lease.stop:
            return False
        return self._coordination.met == (current.stream, current.lease.pass_, current.first)

    def _run_epoch(self, stream: int, epoch: int, figures: Figures) -> Generator[Batch]:
        work, chief = self._coordination.work, self._coordination.chief
        if work is not None:
            self._computer.follow()
        while work is not None:
            yield from self._leases(work, self._pusher, stream, epoch, figures)
            over = chief is None or self._is_settled(chief, stream, epoch)
            if self._coordination.inside.agree(over):
                self._pusher.look_together()
                return

    def _is_settled(self, chief: Chief, stream: int, epoch: int) -> bool:
        """Whether the epoch is over: no server lost its last updates meanwhile."""
        chief.flush(epoch == self._last or self._coordination.agree_to_stop(False))
        self._look()
        return chief.is_settled(stream, epoch)

    @property
    def _pusher(self) -> Pusher:
        if self._coordination.pusher is None:
            raise UserError("batches of a job that was left", "Train before strategy.close().")
        return self._coordination.pusher

    def _look(self) -> None:
        """The newest values into the model."""
        self._pusher.look()

    def _leases(
        self, work: WorkSource, pusher: Pusher, stream: int, epoch: int, figures: Figures
    ) -> Generator[Batch]:
        report: Report | None = None
        before = self._reported = figures.sums()
        while True:
            began, phase = time.perf_counter(), waits()
            found = work.take(stream, epoch, report, wait=False)
            if isinstance(found, Pause):
                pusher.servers.release()
                found = work.take(stream, epoch, None)
            pusher.servers.waited += time.perf_counter() - began
            self.waited += time.perf_counter() - began
            resume(phase)
            self._coordination.take_options(work.timetable)
            if isinstance(found, Complete):
                pusher.servers.release()  # who has not done its own yet need not wait for us
                return
            if isinstance(found, Lease):
                current = pusher.current = WorkPosition(stream, found)
                pusher.idle = partial(self._tell, work, current, figures, before)
                try:
                    ended = yield from self._work_items(current, figures)
                    pusher.settle()
                except BaseException as why:  # left in the middle: others do the rest
                    if self._was_left:
                        raise
                    try:
                        if isinstance(why, GeneratorExit):
                            pusher.leave()
                    finally:
                        self._partial = _since(figures.sums(), before)
                        self._partial_metrics = self._left_metrics(why, pusher, figures.take())
                        given_up = Report(found.id, [], abandoned=True)
                        with suppress(SpartitoError):  # the first cause is what is told
                            work.take(stream, NO_EPOCH, given_up, wait=False)
                    raise
                finally:
                    pusher.current = None
                now = figures.sums()
                report = Report(
                    found.id,
                    _since(now, before),
                    ended,
                    current.bad,
                    current.detail,
                    current.abandoned,
                    figures.take(),
                    self._drawn,
                )
                before = self._reported = now

    def _tell(
        self, work: WorkSource, current: WorkPosition, figures: Figures, before: Sequence[float]
    ) -> None:
        """Tell the chief, which may be saving, what of a lease is in the model."""
        sums = _since(figures.sums(), before)
        told = Reached(current.stream, current.lease.id, current.reached, sums)
        work.reach(told, self._shown if self._pusher.pair.accumulate > 1 else figures.show())

    def _left_metrics(self, why: BaseException, pusher: Pusher, own: bytes) -> list[bytes]:
        """The metrics of a lease that is left: of all members of a group that stops."""
        together = pusher.stops and isinstance(why, GeneratorExit)
        return self._coordination.metrics_inside(own) if together else [own]

    def _work_items(
        self, current: WorkPosition, figures: Figures
    ) -> Generator[Batch, None, int | None]:
        """The batches of a lease; returns where its pass ended, if that was found."""
        lease, expected, pair = current.lease, current.lease.start, self._pusher.pair
        self._drawn = 0
        batches = self._reader.read(lease)
        try:
            for batch in batches:
                current.step, self._drawn = expected, batch.drawn
                expected += 1
                batch = self._placed(batch)
                if lease.group and pair.accumulate > 1 and not pair.passes:
                    self._shown = figures.show()
                began = time.perf_counter()
                self._pusher.ready(batch)
                self.waited += time.perf_counter() - began
                self._computer.enter(batch)
                yield batch
                if current.abandoned:
                    return None
        finally:
            batches.close()
        return None if expected == lease.stop else expected

    def _placed(self, batch: Batch) -> Batch:
        if not self._placing.moves:
            return batch
        move = self._placing.move
        return structs.replace(batch, data=move(batch.data), spare=move(batch.spare))


def _members(metrics: bytes) -> list[bytes]:
    """The metrics of each member of a group, as `GroupWork` reports them."""
    found: list[bytes] = msgspec.msgpack.decode(metrics, type=list[bytes])
    return found


def _since(now: Sequence[float], before: Sequence[float]) -> list[float]:
    return [new - old for new, old in zip(now, before, strict=True)]
