"""What one server holds, and how pushes of many workers become updates of it.

All of it happens under one lock, `Store.lock`; whoever has to wait for others waits on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from spartito.errors import SpartitoError, UserError
from spartito.ps.protocol.histogram import Histogram
from spartito.ps.protocol.keys import Key, Keys
from spartito.ps.protocol.layout import unused
from spartito.ps.protocol.messages import Fence, Lost, Outcome, Push, Schedule, Update, Values
from spartito.ps.protocol.options import settings
from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.runtime import SYSTEM, Runtime
from spartito.ps.protocol.slots import slot_of
from spartito.ps.protocol.timetable import Row, Timetable
from spartito.ps.server.buffers import BufferPool
from spartito.ps.server.compensation import MEANS, compensation_of
from spartito.ps.server.copies import BackupLink
from spartito.ps.server.counter import Counter
from spartito.ps.server.editions import Editions
from spartito.ps.server.mean import Mean
from spartito.ps.server.norms import GradientNorms
from spartito.ps.server.shard import Shard
from spartito.ps.server.staleness import Gate, rate_of
from spartito.ps.server.update_log import PushLog
from spartito.wire.frames import Gone

TICK = 1.0  # seconds after which a waiter looks around even if nobody woke it


class Store:
    """A shard, what it has applied, and who may pull. ``gates`` is set on the first server.

    ``counter`` keeps how many updates were made, those among them that a restart has lost.
    """

    def __init__(
        self,
        shard: Shard,
        rules: Rules,
        *,
        gates: bool,
        log: PushLog | None,
        counter: Counter | None = None,
        runtime: Runtime = SYSTEM,
    ) -> None:
        self.runtime = runtime
        self.shard, self.rules, self.log, self.counter = shard, rules, log, counter
        self.failure: SpartitoError | None = None
        self.primary = rules.replicas == 1
        """Whether tasks are served here; of two replicas the chief appoints one."""
        self.copies: BackupLink | None = None
        """The way to the backup, where there is one."""
        self.lock = runtime.condition()
        self.ready = False
        self.job = ""
        self.version = self.pushes = self.work_items = self.examples = 0
        self.duplicates = self.dropped = self.refused = self.lost = 0
        self.keys, self.staleness, self.norms = Keys(rules.workers), Histogram(), GradientNorms()
        self._gate = Gate(rules.max_staleness or 0) if gates and rules.waits else None
        self._compensation = compensation_of(rules, shard)
        self._waiting = Mean()  # pushes that `aggregate` puts together
        self._rounds: dict[tuple[int, int], Mean] = {}
        self.ended: dict[int, tuple[int, int, int]] = {}  # each worker's last round that is over
        self.absent: dict[int, dict[int, int]] = {}
        self._asked: dict[int, object] = {}  # who waits for a pull in each worker's name
        self.generations: dict[int, int] = {}  # of the process that is each worker now
        self._free_total: Tensor | None = None
        self.buffers = BufferPool()
        """What copies are made in."""
        self.timetable = Timetable()
        self._current: Row | None = None
        self.editions = Editions(len(shard.runs))

    def begin(self, job: str) -> None:
        """The values are there, and are this job's; of another one nothing else is kept."""
        if job != self.job:
            self.version = self.pushes = self.work_items = self.examples = 0
            self.duplicates = self.dropped = self.refused = self.lost = 0
            self.keys, self.staleness = Keys(self.rules.workers), Histogram()
            self._compensation.restore(None)
            self.forget()
            for known in (self.ended, self.absent, self.generations):
                known.clear()
            if self.log is not None:
                self.log.cut(0)
        self.job, self.ready = job, True
        self.editions.note()
        if self.counter is not None:
            self.counter.value = self.version + self.lost
        if self.copies is not None:
            self.copies.all()
        self.lock.notify_all()

    def forget(self) -> None:
        """Nobody waits here, and nothing waits to be applied."""
        self._waiting = Mean()
        self._rounds.clear()
        self._asked.clear()
        if self._gate is not None:
            self._gate = Gate(self.rules.max_staleness or 0)
        self.lock.notify_all()

    def settle(self, whole: bool = False) -> None:
        """Wait until the backup has all that was done here. Called with `lock` held.

        While a new backup gets its first copy nobody waits for it, unless it has to be ``whole``.
        """
        copies = self.copies
        if copies is not None:
            mark = copies.mark()
            while self.copies is copies and not copies.has(mark, whole):
                self._wait()
        self.check_primary()

    def check_primary(self) -> None:
        """Raise `Gone` where another server is the primary: who asks finds it there."""
        if not self.primary:
            raise Gone("another server is the primary")

    def fail(self, failure: SpartitoError) -> None:
        """Nothing more can be done: all who wait get this error. Called with `lock` held."""
        self.failure = self.failure or failure
        self.lock.notify_all()

    def wait_for_fence(self, worker: int, generation: int, seconds: float) -> None:
        """Wait until the chief has sent the generation of this process of ``worker``.

        Called with `lock` held. Raises as `check`, and `TimeoutError` after ``seconds``.
        """
        end = self.runtime.now() + seconds
        while self.generations.get(worker, 0) < generation:
            if self.runtime.now() > end:
                raise TimeoutError(f"no word of {self.rules.name_of(worker)} in {seconds:g} s")
            self._wait()
        self.check(worker, generation)

    def check(self, worker: int, generation: int) -> None:
        """Raise `UserError` if a later process has replaced this one of ``worker``."""
        if generation < self.generations.get(worker, 0):
            raise UserError(
                f"another process has replaced {self.rules.name_of(worker)}",
                "It was given up, or two tasks have the same index.",
            )

    def fence(self, generations: Mapping[int, int]) -> None:
        """From now on refuse processes older than these. Called with `lock` held."""
        if self.copies is not None:
            self.copies.tell(Fence(dict(generations)))
        for worker, generation in generations.items():
            if generation > self.generations.get(worker, 0):
                self.generations[worker] = generation
                self._asked.pop(worker, None)
                self.release(worker)
        self.lock.notify_all()

    def schedule(self, timetable: Timetable) -> None:
        """Use these options from now on. Called with `lock` held."""
        if self.copies is not None:
            self.copies.tell(Schedule(), msgspec.msgpack.encode(timetable))
        self.timetable, self._current = timetable, None

    def push(
        self, worker: int, push: Push, gradient: Tensor, pulled: Tensor | None = None
    ) -> tuple[Outcome, int]:
        """Apply ``gradient``, uint8 ``(bytes,)``; returns the outcome and how stale it was.

        ``pulled`` are the values that it is of, if known: with these it is compensated, in place.
        Called with `lock` held. With ``max_staleness=0`` it returns when all of the group came.
        """
        if push.group:
            return self._push_together(worker, push, gradient), 0
        staleness = self.version - push.pulled
        outcome = self._judge(worker, push, staleness, pulled is not None)
        if outcome is Outcome.APPLIED and not push.dropped:
            self._compensation.take(gradient, pulled, push.absent, staleness)
            self._apply(push, gradient, staleness)
        if self._gate is not None:
            # What is known here may be an update of a server that was started again.
            if outcome is not Outcome.STALE and not push.dropped and self._gate.holds(worker):
                self._gate.push(worker)
            else:
                self._gate.release(worker)
            self.lock.notify_all()
        return outcome, staleness

    def admit(self, worker: int) -> None:
        """Wait until ``worker`` may pull. Called with `lock` held.

        Raises `SpartitoError` if the worker has asked once more, by another connection.
        """
        if self._gate is None:
            return
        mine = self._asked[worker] = object()
        self._gate.ask(worker)
        while worker not in self._gate.grantable():
            self._wait()
            if self._asked.get(worker) is not mine:
                raise SpartitoError(f"{self.rules.name_of(worker)} has come again, elsewhere")
            self._gate.ask(worker)  # it may have been given up meanwhile, though it is here
        self._gate.grant(worker, self.version)
        self.lock.notify_all()

    def release(self, worker: int) -> None:
        """``worker`` neither waits nor pushes: it is idle, or gone."""
        if self._gate is not None:
            self._gate.release(worker)
            self.lock.notify_all()

    def lose(self, worker: int, group: int, size: int) -> None:
        """``worker`` is lost; its lease in ``group`` had ``size`` work items; none waits for it."""
        if self.copies is not None:
            self.copies.tell(Lost(worker, group, size))
        self.release(worker)
        if group:
            self.absent.setdefault(group, {})[worker] = size
            for key in [key for key in self._rounds if key[0] == group]:
                self._finish_round(key)

    def flush(self) -> None:
        """Apply what waits for more pushes to come. Called with `lock` held."""
        if self._waiting.keys:
            self._finish(self._waiting)
            self._waiting = Mean()

    def values(
        self,
        outcome: Outcome = Outcome.APPLIED,
        staleness: int = 0,
        unchanged: list[int] | None = None,
    ) -> Values:
        """How far it is, and which runs of the values do not travel along; None: none do."""
        counts = self.version, self.pushes, self.work_items, self.examples
        return Values(*counts, unchanged, outcome, staleness)

    def applied(self, key: Key) -> bool:
        """Whether a work item was applied, or waits to be."""
        return key in self.keys or key in self._waiting.keys

    def _wait(self) -> None:
        self.lock.wait(TICK)
        if self.failure is not None:
            raise self.failure
        self.check_primary()

    def _judge(self, worker: int, push: Push, staleness: int, known: bool) -> Outcome:
        """What is to become of a push."""
        if all(map(self.applied, push.keys)):
            self.duplicates += 1
            return Outcome.DUPLICATE
        late = self._gate is not None and not self._gate.holds(worker)
        if late or self.rules.refuses(staleness, known):
            self.refused += 1
            return Outcome.STALE
        if push.dropped:
            self.dropped += 1
            self._make(Update(push.keys, push.examples, 1))
        return Outcome.APPLIED

    def _apply(self, push: Push, gradient: Tensor, staleness: int) -> None:
        self.staleness.add(staleness)
        if self.rules.aggregate == 1:
            rate, fresh = rate_of(self.rules, staleness), 1 / (1 + staleness)
            update = Update(push.keys, push.examples, 1, push.absent, rate, fresh, changes=True)
            self._make(update, gradient)
            return
        self._mix(self._waiting, push, gradient)
        self._waiting.pushes += 1
        self._waiting.staleness += staleness
        if self._waiting.finite == self.rules.aggregate:
            self.flush()

    def _push_together(self, worker: int, push: Push, gradient: Tensor) -> Outcome:
        if worker in self.absent.get(push.group, ()):
            return Outcome.EXPIRED  # its round was finished without it
        index = push.group, push.index
        stream = push.keys[0][0]  # each numbers its groups from 1
        if self.ended.get(worker) == (stream, *index):
            self.duplicates += 1
            return Outcome.DUPLICATE  # sent again, because the reply was lost
        mean = self._rounds.setdefault(index, Mean(stream, push.parties))
        known = worker in mean.workers or all(map(self.applied, push.keys))
        self.duplicates += known
        mean.workers.add(worker)
        if not known:
            mean.pushes += push.updates
            if push.dropped:
                self.dropped += 1
                mean.note(push)
            else:
                self.staleness.add(push.staleness)
                mean.parts.append((push, gradient))  # nobody writes to it before all have pushed
        self._finish_round(index)
        while not mean.done:
            self._wait()
        return Outcome.DUPLICATE if known else Outcome.APPLIED

    def _finish_round(self, number: tuple[int, int]) -> None:
        """Update if nobody else can push in this round."""
        mean = self._rounds[number]
        group, index = number
        gone = [
            worker
            for worker, size in self.absent.get(group, {}).items()
            if size > index and worker not in mean.workers
        ]
        if len(mean.workers) + len(gone) < mean.parties:
            return
        del self._rounds[number]
        for push, gradient in sorted(mean.parts, key=lambda part: part[0].keys):
            if all(map(self.applied, push.keys)):  # another worker's, while this one waited
                mean.pushes -= push.updates
                self.duplicates += 1
                continue
            self._mix(mean, push, gradient)  # in the order of slices: the same bits in every run
        self._finish(mean, dict.fromkeys(mean.workers, (mean.stream, *number)))
        mean.done = True
        self.lock.notify_all()

    def _mix(self, mean: Mean, push: Push, gradient: Tensor) -> None:
        buffers = None
        if not mean.finite:
            buffers, self._free_total = self._free_total, None
        mean.add(self.shard, push, gradient, buffers)

    def _finish(self, mean: Mean, ended: dict[int, tuple[int, int, int]] | None = None) -> None:
        absent, total = sorted(mean.absent or ()), None
        if mean.weight:
            mean.finish(self.shard, self.rules.clip_norm)
            total = mean.total
        changes = total is not None
        counts = mean.keys, mean.examples, mean.pushes
        fresh = mean.fresh if changes else 1.0
        self._make(Update(*counts, absent, mean.share, fresh, None, ended or {}, changes), total)
        self._free_total = mean.total if mean.finite and self.copies is None else None

    def _make(self, update: Update, gradient: Tensor | None = None) -> None:
        """Make an update, here and on the backup; without ``gradient`` it is only counted."""
        if gradient is not None:
            options = self.timetable.at(self.pushes // self.rules.workers)
            if options is not None and options is not self._current:
                self._current = options
                update = replace(update, options=options)
        if self.copies is not None:
            self.copies.update(update, gradient)
        self.make(update, gradient)

    def make(self, update: Update, gradient: Tensor | None) -> None:
        """Make an update as it is, which is what a backup does. Called with `lock` held.

        Its ``fresh`` is what a push of n updates ago says of statistics: 1 / (n + 1) of them. So W
        workers together move them as far as one that has the momentum of its BatchNorm.
        """
        if update.options is not None:
            self.shard.set(update.options)
        if gradient is not None:
            how = update.absent, update.rate, update.fresh
            if self.log is not None:
                self.log.append(self.shard, gradient, *how)
            self.shard.update(gradient, *how)
            self.version += 1
            self.editions.note(unused(self.shard.runs, update.absent))
            if self.counter is not None:
                self.counter.value = self.version + self.lost
        self.ended.update(update.ended)
        self.work_items += self.keys.add(update.keys)
        self.pushes += update.pushes
        self.examples += update.examples

    def copy(self) -> dict[str, Tensor]:
        """The values and the optimizer's state, by ``slot/key``; as `dump`."""
        state = {f"{slot}/{key}": value for (slot, key), value in self.shard.state().items()}
        return self.buffers.copy({"values": self.shard.values, **state})

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A copy of everything that a restarted server needs: tensors, and plain values.

        Called with `lock` held. Give the tensors back to `buffers` when they are of no more use.
        """
        tensors = self.copy() | self._compensation.state()
        if bits := self.keys.dump():
            tensors["keys"] = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
        about = {
            "job": self.job,
            "digest": self.shard.layout.digest,
            "counts": [self.version, self.pushes, self.work_items, self.examples],
            "others": [self.duplicates, self.dropped, self.refused, self.lost],
            "staleness": self.staleness.to_dict(),
            "settings": settings(self.shard.optimizer),
            "log": self.log.position if self.log is not None else 0,
        }
        return tensors, about

    def restore(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Take back what `dump` returned."""
        self.shard.values.copy_(tensors.pop("values"))
        bits = tensors.pop("keys", torch.empty(0, dtype=torch.uint8))
        self.keys = Keys.load(self.rules.workers, bits.numpy().tobytes())
        self._compensation.restore(tensors.pop(MEANS, None))
        self.shard.set(about["settings"])
        self.shard.load_state({slot_of(name): value for name, value in tensors.items()})
        self.version, self.pushes, self.work_items, self.examples = about["counts"]
        self.duplicates, self.dropped, self.refused, self.lost = about["others"]
        if self.counter is not None:
            self.lost = max(self.lost, self.counter.value - self.version)
        self.staleness = Histogram.from_dict(about["staleness"])
        self.job, self.ready = about["job"], True
        self.editions.note()
        if self.log is not None:
            self.log.cut(about["log"])
