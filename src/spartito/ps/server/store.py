"""What one server holds, and how pushes of many workers become updates of it.

All of it happens under one lock, `Store.lock`; whoever has to wait for others waits on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spartito.errors import SpartitoError, UserError
from spartito.ps.protocol.histogram import Histogram
from spartito.ps.protocol.keys import Key, Keys
from spartito.ps.protocol.layout import unused
from spartito.ps.protocol.messages import Outcome, Push, Values
from spartito.ps.protocol.options import settings
from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.runtime import SYSTEM, Runtime
from spartito.ps.protocol.timetable import Row, Timetable
from spartito.ps.server.buffers import BufferPool
from spartito.ps.server.counter import Counter
from spartito.ps.server.mean import Mean
from spartito.ps.server.norms import GradientNorms
from spartito.ps.server.shard import Shard
from spartito.ps.server.staleness import Gate
from spartito.ps.server.update_log import PushLog

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
        self.lock = runtime.condition()
        self.ready = False
        self.job = ""
        self.version = self.pushes = self.work_items = self.examples = 0
        self.duplicates = self.dropped = self.refused = self.lost = 0
        self.keys = Keys(rules.workers)
        self.staleness = Histogram()
        self.norms = GradientNorms()
        self._gate = Gate(rules.max_staleness or 0) if gates and rules.waits else None
        self._waiting = Mean()  # pushes that `aggregate` puts together
        self._rounds: dict[tuple[int, int], Mean] = {}
        self._ended: dict[int, tuple[int, int, int]] = {}  # each worker's last round that is over
        self._absent: dict[int, dict[int, int]] = {}
        self._asked: dict[int, object] = {}  # who waits for a pull in each worker's name
        self._generations: dict[int, int] = {}  # of the process that is each worker now
        self._free_total: Tensor | None = None
        self.buffers = BufferPool()
        """What copies are made in."""
        self._timetable = Timetable()
        self._current: Row | None = None
        self.edition = 0
        """Grows whenever values change, by whatever cause."""
        self._changed = [0] * len(shard.runs)  # the edition of each run's values

    def begin(self, job: str) -> None:
        """The values are there, and are this job's; of another one nothing else is kept."""
        if job != self.job:
            self.version = self.pushes = self.work_items = self.examples = 0
            self.duplicates = self.dropped = self.refused = self.lost = 0
            self.keys, self.staleness = Keys(self.rules.workers), Histogram()
            self._waiting = Mean()
            self._rounds.clear()
            self._ended.clear()
            self._absent.clear()
            self._generations.clear()
            if self._gate is not None:
                self._gate = Gate(self.rules.max_staleness or 0)
            if self.log is not None:
                self.log.cut(0)
        self.job, self.ready = job, True
        self._note_change()
        if self.counter is not None:
            self.counter.value = self.version + self.lost
        self.lock.notify_all()

    def fail(self, failure: SpartitoError) -> None:
        """Nothing more can be done: all who wait get this error. Called with `lock` held."""
        self.failure = self.failure or failure
        self.lock.notify_all()

    def wait_for_fence(self, worker: int, generation: int, seconds: float) -> None:
        """Wait until the chief has sent the generation of this process of ``worker``.

        Called with `lock` held. Raises as `check`, and `TimeoutError` after ``seconds``.
        """
        end = self.runtime.now() + seconds
        while self._generations.get(worker, 0) < generation:
            if self.runtime.now() > end:
                raise TimeoutError(f"the chief did not tell of worker {worker} in {seconds:g} s")
            self._wait()
        self.check(worker, generation)

    def check(self, worker: int, generation: int) -> None:
        """Raise `UserError` if a later process has replaced this one of ``worker``."""
        if generation < self._generations.get(worker, 0):
            raise UserError(
                f"another process has replaced worker {worker}",
                "It was given up, or two tasks have the same index.",
            )

    def fence(self, generations: Mapping[int, int]) -> None:
        """From now on refuse processes older than these. Called with `lock` held."""
        for worker, generation in generations.items():
            if generation > self._generations.get(worker, 0):
                self._generations[worker] = generation
                self._asked.pop(worker, None)
                self.release(worker)
        self.lock.notify_all()

    def schedule(self, timetable: Timetable) -> None:
        """Use these options from now on. Called with `lock` held."""
        self._timetable, self._current = timetable, None

    def push(self, worker: int, push: Push, gradient: Tensor) -> tuple[Outcome, int]:
        """Apply ``gradient``, uint8 ``(bytes,)``; returns the outcome and how stale it was.

        Called with `lock` held. With ``max_staleness=0`` it returns when all of the group came.
        """
        if push.group:
            return self._push_together(worker, push, gradient), 0
        staleness = self.version - push.pulled
        outcome = self._judge(worker, push, staleness)
        if outcome is Outcome.APPLIED and not push.dropped:
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
                raise SpartitoError(f"worker {worker} has come again by another connection")
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
        self.release(worker)
        if group:
            self._absent.setdefault(group, {})[worker] = size
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

    def _judge(self, worker: int, push: Push, staleness: int) -> Outcome:
        """What is to become of a push."""
        if all(map(self.applied, push.keys)):
            self.duplicates += 1
            return Outcome.DUPLICATE
        late = self._gate is not None and not self._gate.holds(worker)
        limit = self.rules.max_staleness
        beyond = limit is not None and staleness > limit and self.rules.on_stale != "compensate"
        if late or beyond:
            self.refused += 1
            return Outcome.STALE
        if push.dropped:
            self.dropped += 1
            self._count(push.keys, push.examples, 1)
        return Outcome.APPLIED

    def _apply(self, push: Push, gradient: Tensor, staleness: int) -> None:
        self.staleness.add(staleness)
        if self.rules.aggregate == 1:
            rate = self._rate(staleness)
            self._update(gradient, push.absent, rate, 1 / (1 + staleness))
            self._count(push.keys, push.examples, 1)
            return
        self._mix(self._waiting, push, gradient)
        self._waiting.pushes += 1
        self._waiting.staleness += staleness
        if self._waiting.finite == self.rules.aggregate:
            self.flush()

    def _rate(self, staleness: int) -> float:
        """The factor of the learning rate for a stale push, where it is to be compensated.

        A gradient that is n times as stale as allowed moves the values 1/n as far, as in Zhang
        et al., "Staleness-aware async-SGD" (2016).
        """
        limit = self.rules.max_staleness
        if limit is None or self.rules.on_stale != "compensate" or staleness <= limit:
            return 1.0
        return (limit + 1) / (staleness + 1)

    def _push_together(self, worker: int, push: Push, gradient: Tensor) -> Outcome:
        if worker in self._absent.get(push.group, ()):
            return Outcome.EXPIRED  # its round was finished without it
        index = push.group, push.index
        stream = push.keys[0][0]  # each numbers its groups from 1
        if self._ended.get(worker) == (stream, *index):
            self.duplicates += 1
            return Outcome.DUPLICATE  # sent again, because the reply was lost
        mean = self._rounds.setdefault(index, Mean(stream, push.parties))
        known = worker in mean.workers or all(map(self.applied, push.keys))
        self.duplicates += known
        mean.workers.add(worker)
        if not known:
            mean.pushes += 1
            if push.dropped:
                self.dropped += 1
                mean.note(push)
            else:
                self.staleness.add(0)
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
            for worker, size in self._absent.get(group, {}).items()
            if size > index and worker not in mean.workers
        ]
        if len(mean.workers) + len(gone) < mean.parties:
            return
        del self._rounds[number]
        self._ended.update(dict.fromkeys(mean.workers, (mean.stream, *number)))
        for push, gradient in sorted(mean.parts, key=lambda part: part[0].keys):
            if all(map(self.applied, push.keys)):  # another worker's, while this one waited
                mean.pushes -= 1
                self.duplicates += 1
                continue
            self._mix(mean, push, gradient)  # in the order of slices: the same bits in every run
        self._finish(mean)
        mean.done = True
        self.lock.notify_all()

    def _mix(self, mean: Mean, push: Push, gradient: Tensor) -> None:
        buffers = None
        if not mean.finite:
            buffers, self._free_total = self._free_total, None
        mean.add(self.shard, push, gradient, buffers)

    def _finish(self, mean: Mean) -> None:
        if mean.weight:
            mean.finish(self.shard, self.rules.clip_norm)
            self._update(mean.total, sorted(mean.absent or ()), 1.0, mean.fresh)
        self._count(mean.keys, mean.examples, mean.pushes)
        self._free_total = mean.total if mean.finite else None

    def _update(self, gradient: Tensor, absent: Sequence[int], rate: float, fresh: float) -> None:
        """``fresh`` is what a push of n updates ago says of statistics: 1 / (n + 1) of them.

        So W workers together move them as far as one that has the momentum of its BatchNorm.
        """
        options = self._timetable.at(self.pushes // self.rules.workers)
        if options is not None and options is not self._current:
            self.shard.set(options)
            self._current = options
        if self.log is not None:
            self.log.append(self.shard, gradient, absent, rate, fresh)
        self.shard.update(gradient, absent, rate, fresh)
        self.version += 1
        self._note_change(unused(self.shard.runs, absent))
        if self.counter is not None:
            self.counter.value = self.version + self.lost

    def unchanged(self, since: int) -> frozenset[int]:
        """The runs, by index, whose values are those that they had at `edition` ``since``."""
        if min(self._changed, default=0) > since:  # as after most pushes
            return frozenset()
        return frozenset(n for n, edition in enumerate(self._changed) if edition <= since)

    def _note_change(self, but: frozenset[int] = frozenset()) -> None:
        """The values of all runs but these are others than before."""
        self.edition += 1
        for number in range(len(self._changed)):
            if number not in but:
                self._changed[number] = self.edition

    def _count(self, keys: Iterable[Key], examples: int, pushes: int) -> None:
        self.work_items += self.keys.add(keys)
        self.pushes += pushes
        self.examples += examples

    def copy(self) -> dict[str, Tensor]:
        """The values and the optimizer's state, by ``slot/key``; as `dump`."""
        state = {f"{slot}/{key}": value for (slot, key), value in self.shard.state().items()}
        return self.buffers.copy({"values": self.shard.values, **state})

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A copy of everything that a restarted server needs: tensors, and plain values.

        Called with `lock` held. Give the tensors back to `buffers` when they are of no more use.
        """
        tensors = self.copy()
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
        self.shard.set(about["settings"])
        self.shard.load_state({slot_of(name): value for name, value in tensors.items()})
        self.version, self.pushes, self.work_items, self.examples = about["counts"]
        self.duplicates, self.dropped, self.refused, self.lost = about["others"]
        if self.counter is not None:
            self.lost = max(self.lost, self.counter.value - self.version)
        self.staleness = Histogram.from_dict(about["staleness"])
        self.job, self.ready = about["job"], True
        self._note_change()
        if self.log is not None:
            self.log.cut(about["log"])


def slot_of(name: str) -> tuple[int, str]:
    """Slot and key of a tensor of the state in a `Store.copy`."""
    number, _, key = name.partition("/")
    return int(number), key
