"""What the tasks of a job with parameter servers agree on: its chief decides."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective, Traffic
from spartito.engine.updates.optimizers import unwrap
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.notes import shown
from spartito.ps.chief import JOB, Chief
from spartito.ps.client.pulled_values import PulledValues
from spartito.ps.job import Job
from spartito.ps.protocol.messages import Values, advance, furthest
from spartito.ps.protocol.options import set_options, settings
from spartito.ps.protocol.timetable import Row, Timetable, decode_timetable
from spartito.ps.protocol.work import NOWHERE, At, WorkSource
from spartito.ps.scheduler.ledger import Kept
from spartito.ps.scheduler.planner import Planner
from spartito.steps.coordination import Coordination, attempt_together
from spartito.steps.distributed import StepResult
from spartito.steps.prepared import Pairs
from spartito.steps.servers import groups
from spartito.steps.servers.callback_writes import CallbackWrites
from spartito.steps.servers.group_member import Inside
from spartito.steps.servers.group_member_links import GroupWork
from spartito.steps.servers.push import Pusher
from spartito.steps.task_end import cause, told, uncaught

T = TypeVar("T")

REDONE = "redone"
"""The figure of an epoch: work items that were given out again, as a server had forgotten them."""


class LeasedCoordination(Coordination):
    """Workers that never meet: the chief leases work to them and publishes what it decides.

    ``chief`` is there on the chief, ``work`` and ``pusher`` on all that compute, none of them on
    an evaluator or once the job was left. ``shards`` is the number of data shards of a batch.
    """

    def __init__(
        self, name: str, job: ClusterSpec, cluster: ClusterSpec, pairs: Pairs, shards: int
    ) -> None:
        super().__init__(name, job, cluster, pairs)
        self.shards = shards
        self.chief: Chief | None = None
        self.work: WorkSource | None = None
        self.pusher: Pusher | None = None
        self.inside = Inside.alone()
        """One's own group, where it trains apart."""
        self.member = (0, 1)
        """Which rows of what its group does are this task's, as (index, count)."""
        self.members: Collective | None = None
        """Those of one's own group, if they have a model between them."""
        self._job: Job | None = None
        self._planner: Planner | None = None
        self._streams = self._published = 0
        self.met: At = NOWHERE
        """Where all groups were when their states were brought together; for the next position."""
        self._told = 0  # dropped pushes that a result has told of
        self._redone = 0  # work items of which figures have told that they were done again
        self._stopped = False
        self._encoded, self._timetable = b"", Timetable()
        self._seen = Values(0, 0, 0, 0)
        self._went_on = self._trains = False
        self._first_epoch = self._opened = 0
        self.given: PulledValues | None = None
        """What the servers have given, or were given; compared where somebody may have written."""
        self._writes: CallbackWrites | None = None

    def join(
        self,
        job: Job,
        chief: Chief | None,
        work: WorkSource | None,
        pusher: Pusher,
        inside: Inside,
        member: tuple[int, int],
    ) -> None:
        """Take part in a job that has begun."""
        self.inside, self.member = inside, member
        self._job, self.chief, self.work, self.pusher = job, chief, work, pusher
        if chief is not None:
            self._planner = chief.planner = Planner(pusher.pair.optimizer, job.rules.every)

    # What another process goes on from, if this one is the chief and is lost

    @property
    def keeps(self) -> bool:
        """Whether another process could go on as the chief."""
        return self.chief is not None and self.chief.book.keeps

    @property
    def kept(self) -> bytes:
        """Where another process was in a training that it led; b"" where there was none."""
        if self.chief is None or self._went_on or not self.chief.book.goes_on:
            return b""
        return self.chief.book.ledger.kept

    def keep(self, state: bytes) -> None:
        """Have another process find ``state`` when this one is lost."""
        if self.chief is not None:
            self.chief.coordinator.note(Kept(state))

    def state_dict(self) -> dict[str, Any]:
        """How far the chief has counted, and what it has told the others."""
        if self.chief is None or self._planner is None:
            return {}
        return {
            "seen": msgspec.structs.astuple(self._seen)[:4],
            "told": self._told,
            "redone": self._redone,
            "opened": self._opened,
            "published": self.chief.published,
            "options": settings(self._pairs.only.optimizer),
            "planner": self._planner.state_dict(),
        }

    def go_on(self, state: dict[str, Any], first: int) -> None:
        """Be where another process was that was the chief; ``first``: its epoch of the stream."""
        if self.chief is None or self._planner is None:
            return
        self._went_on, self._first_epoch = True, first
        self._seen, self._told = Values(*state["seen"]), state["told"]
        self._redone = state["redone"]
        self._opened, self.chief.published = state["opened"], state["published"]
        set_options(self._pairs.only.optimizer.param_groups, state["options"])
        self.chief.go_on(self._planner, state["planner"], self._seen.pushes // self.shards)

    # What every kind of coordination has

    @property
    def decides(self) -> bool:
        """Only the chief evaluates and has callbacks."""
        return self.cluster.is_chief

    @property
    def joins(self) -> bool:
        return bool(self.kept)

    def attempt_in_group(self, work: Callable[[], str]) -> list[str]:
        """As `attempt`, of the members of one's own group if they have a model between them."""
        if (members := self.members) is None:
            return self.attempt(work)

        def tell(text: str) -> list[str]:
            return [each.decode() for each in members.all_gather_bytes(text.encode())]

        return attempt_together(work, tell, lambda rank: members.names[rank])

    @property
    def traffic(self) -> Traffic:
        return Traffic() if self.pusher is None else self.pusher.servers.traffic

    def describe(self) -> dict[str, Any]:
        """Which server holds what, and how stale pushes were so far."""
        if self._job is None or self.chief is None:
            return super().describe()
        figures = {"servers": self._job.table(), "staleness": self.chief.staleness()}
        if self._job.rules.every:
            figures["staleness"] = self.chief.coordinator.meetings.staleness()
        return {**super().describe(), **figures}

    def figures(self, own: Sequence[float]) -> dict[str, float]:
        """What was done again after a server was lost; of groups that train apart what was merged.

        Those figures are losses, merges, staleness, rejections and bytes.
        """
        if self.chief is None or self._job is None:
            return {}
        before, self._redone = self._redone, self.chief.lost
        found: dict[str, float] = {REDONE: self._redone - before}
        if self._job.rules.every:
            found |= groups.figures(self.chief.coordinator.meetings.take(), self.shards)
        return found

    @contextmanager
    def during(self, purpose: str, optimizer: Optimizer | None = None) -> Generator[None]:
        busy = nullcontext() if self.chief is None else self.chief.at_work()
        with busy, super().during(purpose, optimizer):
            yield

    @contextmanager
    def training(self) -> Generator[None]:
        before, self._trains = self._trains, True
        self.inside.gave_up = False
        try:
            with self.inside.naming():
                yield
        finally:
            self._trains = before

    def publish(self, work: Callable[[], T]) -> T:
        if self.chief is not None and self._trains:
            return work()  # a callback's: the workers, which have none, do not ask for it
        if self.chief is not None:
            known: list[T] = self.chief.recall()
            with self.inside.at_work():
                found = known[0] if known else work()
            if not known:
                self.chief.publish(found)
            with suppress(SpartitoError) if sys.exc_info()[1] else nullcontext():
                self.inside.tell(lambda: json.dumps(found).encode())
            return found
        if self.work is None:  # an evaluator
            return work()
        self._published += 1
        with self.inside.naming():
            published: T = json.loads(self.work.published(JOB + self._published))
        return published

    def agree_to_stop(self, asked: bool) -> bool:
        if asked and self.chief is not None and not self._stopped:
            self.chief.stop()
        self._stopped = self._stopped or asked
        return self._stopped

    @contextmanager
    def deciding(self) -> Generator[None]:
        with nullcontext() if self.chief is None else self.inside.at_work():
            yield

    def agree_to_end(self, asked: bool) -> bool:
        found = self.agree_to_stop(asked)
        if self.inside.several:  # what one of them does, all do
            self.inside.tell(lambda: b"")  # the chief may still be deciding
            found = self.agree_to_stop(self.inside.any(found))
        return found

    def synchronize(self) -> None:
        """The newest values into the model."""
        if self.pusher is not None:
            self._check_callbacks()
            self.pusher.look()
            self.noted()  # what a script writes before its next fit would be lost too
            self._show(furthest(self._seen, self._newest()))

    def follow(self, schedule: LRScheduler | None, ahead: int = 0) -> None:
        if self._planner is not None:
            self._planner.schedule, self._planner.ahead = schedule, ahead

    def publish_rates(self) -> None:
        self.announce_options()

    def watch(self, runs: bool, alone: bool = False) -> None:
        if (pulled := self._pulled) is not None:
            pulled.watch(runs)
        others = self.cluster.num_computing > (self.work is not None)
        self._writes = None
        if runs and alone and others and self.chief is not None:
            model = unwrap(self._pairs.only.model)
            self._writes = CallbackWrites(model, str(self.job.task))

    def in_callbacks(self) -> AbstractContextManager[None]:
        return nullcontext() if self._writes is None else self._writes.refused()

    def _check_callbacks(self) -> None:
        """Refuse what a callback that asks for other values has written."""
        if self._writes is not None:
            self._writes.check()

    def failed(self, error: BaseException | None) -> None:
        if self.chief is not None:
            if what := cause(error):
                lost = TaskLostError(
                    f"{self.cluster.name_of(0)} ended the job: {shown(what, 500)}",
                    "It is the chief: look at its last lines.",
                )
                links = self.pusher.servers.links if self.pusher is not None else ()
                leave, self.inside = partial(self.inside.fail, lost), Inside.alone()
                self.chief.fail(lost, links, isinstance(error, KeyboardInterrupt), leave)
        elif self.pusher and self.work and (what := told(error)):
            self.work.fail(what)
            self.inside.gave_up = True  # others would wait for as long as this process lives

    # What leases and pushes ask for

    @property
    def computing(self) -> Pusher:
        """The way to the servers; `UserError` for a task that computes nothing."""
        if self.pusher is None:
            raise UserError(
                f"training on {self.job.task}, which has left the job or was never in it",
                "Train before strategy.close(), on a chief or worker.",
            )
        return self.pusher

    def metrics_inside(self, own: bytes) -> list[bytes]:
        """The metrics of the present lease, of all members of one's own group."""
        return self.work.metrics(own) if isinstance(self.work, GroupWork) else [own]

    def next_stream(self) -> tuple[int, int]:
        """The number of a new stream, equal on all tasks, and its first epoch that is not done."""
        self._streams += 1
        if self.given is not None and self.given is not self._pulled:
            self.given.check()
            self.given.came()  # from here on the group has values of its own
        first, self._first_epoch = self._first_epoch, 0
        if not first:
            self._opened = self._seen.pushes // self.shards
        self._stopped = bool(self.chief and self._streams in self.chief.book.ledger.stopped)
        return self._streams, first

    @property
    def counted(self) -> int:
        """The global steps of this stream that a result has told of, in any order."""
        return self._seen.pushes // self.shards - self._opened

    def announce_options(self) -> None:
        """As the chief: have the servers know which options of the optimizer hold when."""
        if self.chief is not None and self._planner is not None:
            self.computing.check_learned()
            self.chief.schedule(self._seen.pushes // self.shards)

    def take_options(self, timetable: bytes) -> None:
        """From now on show the options of the chief's timetable."""
        if timetable != self._encoded:
            self._encoded = timetable
            self._timetable = decode_timetable(timetable) if timetable else Timetable()

    @property
    def step(self) -> int:
        """The global steps that a result has told of, of all streams."""
        return self._seen.pushes // self.shards

    def at(self, step: int) -> Row | None:
        """What the schedule says of a global step."""
        return self._timetable.at(step)

    def progress(self, output: Any = None, loss: float = 0.0, weight: float = 0.0) -> StepResult:
        """How far the whole training has come since the last result."""
        before = self._seen
        self._seen = furthest(before, self._newest())  # a restarted server counts again
        self._show(self._seen)
        examples, batches, updates = advance(before, self._seen, self.shards)
        dropped = max(self.skipped - self._told, 0)
        self._told += dropped
        return StepResult(
            output,
            examples,
            batches,
            updates,
            loss=loss,
            weight=weight,
            stop=self._stopped,
            dropped=dropped,
        )

    def fetch(self) -> Row | None:
        """On the chief: values and optimizer state from the servers into our own.

        Returns the options that the servers' optimizers count in.
        """
        if self.chief is None or self._job is None or self._planner is None:
            return None
        self.computing.arrive()
        pulled = self._pulled
        if pulled is not None:
            pulled.check()
        self._check_callbacks()
        served = self._job.fetch(self.chief)
        if pulled is not None:
            pulled.came()
        self.computing.show()
        if self._writes is not None:
            self._writes.note()
        return None if self._job.rules.every else self._planner.counters(served)

    def give(self) -> None:
        """On the chief: the model's values and the optimizer's state to the servers."""
        if self.kept:
            return  # the servers' are newer
        if self._planner is not None:
            self._planner.begin()
        if self.chief is not None and self._job is not None:
            self._job.give(self.chief)
            self.noted()

    def noted(self) -> None:
        """On the chief: the servers have the values that the model has now."""
        if self.chief is not None and self.given is not None:
            self.given.note()
        if self._writes is not None:
            self._writes.note()

    @property
    def _pulled(self) -> PulledValues | None:
        return None if self.pusher is None else self.pusher.servers.pulled

    def leave(self) -> None:
        """Leave the job; the chief ends it once the workers have left."""
        pusher, work, chief = self.pusher, self.work, self.chief
        self.pusher = self.work = self.chief = None
        self.inside.leave(together=uncaught() is None)
        if pusher is not None:
            pusher.servers.close()
        if work is not None:
            work.close()
        if chief is not None:
            chief.close()

    def _show(self, now: Values) -> None:
        """Give our own optimizer the options of the global step, as the servers have them."""
        options = self._timetable.at(now.pushes // self.shards)
        if options is not None and self.chief is None:  # the chief's are the schedule's own
            set_options(self._pairs.only.optimizer.param_groups, options)

    @property
    def skipped(self) -> int:
        """On the chief: pushes that were not finite, as far as they were reported; ours at once."""
        if self.chief is None:
            return 0
        current = self.computing.current
        return self.chief.coordinator.dropped + (0 if current is None else current.bad)

    def _newest(self) -> Values:
        if self.work is None and self.chief is not None:
            return self.chief.progress()
        return self.computing.servers.progress
