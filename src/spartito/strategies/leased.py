"""What the tasks of a job with parameter servers agree on: its chief decides."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from torch.optim.lr_scheduler import LRScheduler

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Traffic
from spartito.errors import UserError
from spartito.ps.chief import JOB, Chief
from spartito.ps.job import Job
from spartito.ps.protocol.messages import Values, advance, furthest
from spartito.ps.protocol.options import set_options
from spartito.ps.protocol.timetable import Row, Timetable, decode_timetable
from spartito.ps.protocol.work import WorkSource
from spartito.ps.scheduler.planner import Planner
from spartito.strategies.coordination import Coordination
from spartito.strategies.distributed import StepResult
from spartito.strategies.ending import told
from spartito.strategies.pair import Pairs
from spartito.strategies.pusher import Pusher

T = TypeVar("T")


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
        self._job: Job | None = None
        self._planner: Planner | None = None
        self._streams = self._published = 0
        self._told = 0  # dropped pushes that a result has told of
        self._stopped = False
        self._encoded, self._timetable = b"", Timetable()
        self._seen = Values(0, 0, 0, 0)

    def join(self, job: Job, chief: Chief | None, work: WorkSource | None, pusher: Pusher) -> None:
        """Take part in a job that has begun."""
        self._job, self.chief, self.work, self.pusher = job, chief, work, pusher
        if chief is not None:
            self._planner = chief.planner = Planner(pusher.pair.optimizer)

    # What every kind of coordination has

    @property
    def decides(self) -> bool:
        """Only the chief evaluates and has callbacks."""
        return self.cluster.is_chief

    @property
    def traffic(self) -> Traffic:
        return Traffic() if self.pusher is None else self.pusher.servers.traffic

    def describe(self) -> dict[str, Any]:
        """Which server holds what, and how stale pushes were so far."""
        if self._job is None or self.chief is None:
            return super().describe()
        figures = {"servers": self._job.table(), "staleness": self.chief.staleness()}
        return {**super().describe(), **figures}

    def publish(self, work: Callable[[], T]) -> T:
        if self.chief is not None:
            found = work()
            self.chief.publish(found)
            return found
        if self.work is None:  # an evaluator
            return work()
        self._published += 1
        published: T = json.loads(self.work.published(JOB + self._published))
        return published

    def agree_to_stop(self, asked: bool) -> bool:
        if asked and self.chief is not None and not self._stopped:
            self.chief.stop()
        self._stopped = self._stopped or asked
        return self._stopped

    def synchronize(self) -> None:
        """The newest values into the model."""
        if self.pusher is not None:
            self.pusher.look()
            self._show(furthest(self._seen, self._newest()))

    def follow(self, schedule: LRScheduler | None) -> None:
        if self._planner is not None:
            self._planner.schedule = schedule

    def publish_rates(self) -> None:
        self.announce_options()

    def failed(self, error: BaseException | None) -> None:
        if self.pusher and self.work and (what := told(error)):
            self.work.fail(what)

    # What leases and pushes ask for

    @property
    def computing(self) -> Pusher:
        """The way to the servers; `UserError` for a task that computes nothing."""
        if self.pusher is None:
            raise UserError(
                f"training on {self.task}, which has left the job or was never in it",
                "Train before strategy.close(), on a chief or worker.",
            )
        return self.pusher

    def next_stream(self) -> int:
        """The number of a new stream, equal on all tasks."""
        self._streams += 1
        self._stopped = False
        return self._streams

    def announce_options(self) -> None:
        """As the chief: have the servers know which options of the optimizer hold when."""
        if self.chief is not None and self._planner is not None:
            self._pairs.only.gradients.refresh()  # other parameters are refused first
            self.chief.schedule(self._seen.pushes // self.shards)

    def take_options(self, timetable: bytes) -> None:
        """From now on show the options of the chief's timetable."""
        if self.chief is None and timetable != self._encoded:
            self._encoded = timetable
            self._timetable = decode_timetable(timetable) if timetable else Timetable()

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
        return self._planner.counters(self._job.fetch(self.chief))

    def give(self) -> None:
        """On the chief: the model's values and the optimizer's state to the servers."""
        if self._planner is not None:
            self._planner.begin()
        if self.chief is not None and self._job is not None:
            self._job.give(self.chief)

    def leave(self) -> None:
        """Leave the job; the chief ends it once the workers have left."""
        pusher, work, chief = self.pusher, self.work, self.chief
        self.pusher = self.work = self.chief = None
        if pusher is not None:
            pusher.servers.close()
        if work is not None:
            work.close()
        if chief is not None:
            chief.close()

    def _show(self, now: Values) -> None:
        """Give our own optimizer the options of the global step, as the servers have them."""
        options = self._timetable.at(now.pushes // self.shards)
        if options is not None:
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
