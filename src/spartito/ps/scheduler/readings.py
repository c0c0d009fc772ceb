"""How far the streams of a job are, as its coordinator knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from spartito.errors import TaskLostError
from spartito.ps.protocol.runtime import Condition, Runtime
from spartito.ps.protocol.work import Lease, Reached, Totals
from spartito.ps.scheduler.progress import Settled, level
from spartito.ps.scheduler.queue import WorkQueue, WorkRange

LOOK_SECONDS = 0.25
"""How often who waits for workers looks whether one is missing."""


@dataclass(frozen=True, slots=True)
class Halfway:
    """An epoch up to a step at which all workers are, but what the asking one has not reported.

    ``sums`` and ``others`` are those that were reported, and that are still to be; ``metrics``
    are the states of both.
    """

    sums: Sequence[float]
    others: Sequence[Sequence[float]]
    metrics: Sequence[bytes]


class Readings:
    """What can be asked of the queues of all streams; ``changed`` is their lock.

    Who is among ``stopped`` has ended. No wait takes longer than ``timeout`` seconds.
    """

    def __init__(
        self,
        changed: Condition,
        queues: Mapping[int, WorkQueue],
        stopped: Collection[int],
        runtime: Runtime,
        timeout: float,
    ) -> None:
        self._changed, self._queues, self._stopped = changed, queues, stopped
        self.runtime, self.timeout = runtime, timeout
        self._reached: dict[int, tuple[Reached, bytes]] = {}
        self.given_up: TaskLostError | None = None
        """What all workers hear, as the chief's own training has failed."""
        self.quiet = False
        """Whether they do not hear it yet."""

    def give_up(self, error: TaskLostError, quiet: bool = False) -> None:
        """The chief's training has failed: whoever asks for anything gets this ``error``.

        Args:
            error: What went wrong; the first one counts.
            quiet: Whether who asks waits until this is called again without it.
        """
        with self._changed:
            self.given_up, self.quiet = self.given_up or error, quiet
            self._changed.notify_all()

    @property
    def told(self) -> TaskLostError | None:
        """What all workers hear by now."""
        return None if self.quiet else self.given_up

    def refusal(self) -> TaskLostError | None:
        """What who asks for anything gets instead, if anything, once it may be known."""
        began = self.runtime.now()
        with self._changed:
            # Who asks has the error before its own limit is over.
            while self.quiet and self.runtime.now() - began < self.timeout / 2:
                self._changed.wait(LOOK_SECONDS)
            return self.given_up

    def check(self, began: float | None = None) -> None:
        """Raise what went wrong."""

    def reach(self, worker: int, reached: Reached, metrics: bytes) -> None:
        """``worker`` waits for others in the middle of a lease, with these metrics."""
        with self._changed:
            self._reached[worker] = reached, metrics
            self._changed.notify_all()

    def halfway(self, stream: int, lease: int, step: int) -> Halfway | None:
        """All that is done before a step of ``lease`` and of those that were granted with it.

        Who has these waits for its worker before the update of ``step``, or reports soon. None
        where not all slices are there, or somebody does not get there in time.
        """
        end = self.runtime.now() + self.timeout
        with self._changed:
            queue = self._queues[stream]
            while (out := level(queue.dump(), lease)) is not None:
                told = [self._reached.get(held.worker) for held in out]
                found = [
                    one
                    for one, held in zip(told, out, strict=True)
                    if one is not None and (one[0].lease, one[0].step) == (held.lease.id, step)
                ]
                if len(found) == len(out):
                    (epoch,) = {one.epoch for _, one in queue.held() if one.id == lease}
                    sums = sorted(one.sums for one, _ in found)  # in whatever order they came
                    metrics = [*queue.metrics(epoch), *(state for _, state in found)]
                    return Halfway(queue.sums(epoch), sums, metrics)
                self.check()
                if self.runtime.now() > end:
                    return None
                self._changed.wait(LOOK_SECONDS)
            return None

    def sums(self, stream: int, epoch: int) -> Totals:
        """What is done of an epoch."""
        with self._changed:
            queue = self._queues[stream]
            counts = queue.items_done(epoch), queue.plan.data_shards, queue.steps(epoch)
            return Totals(queue.sums(epoch), *counts, queue.metrics(epoch))

    def frontier(self, stream: int) -> tuple[int, int]:
        """(pass, step) of the first global batch with a work item that is not finished."""
        with self._changed:
            return self._queues[stream].frontier()

    def settled(self, stream: int, epoch: int, met: tuple[int, int] | None = None) -> Settled:
        """From where an epoch would be gone on with; ``met``: where all workers have met."""
        with self._changed:
            return self._queues[stream].settled(epoch, met)

    @property
    def is_open(self) -> bool:
        """Whether there is a stream that has not ended."""
        with self._changed:
            return any(stream not in self._stopped for stream in self._queues)

    def begun_in(self, stream: int) -> list[WorkRange]:
        """All work of a stream that is finished or out."""
        with self._changed:
            return list(self._queues[stream].begun())

    def held(self, stream: int) -> list[tuple[int, Lease]]:
        """(worker, lease) of all leases that are out."""
        with self._changed:
            return self._queues[stream].held()
