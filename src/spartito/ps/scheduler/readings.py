"""How far the streams of a job are, as its coordinator knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spartito.ps.protocol.runtime import Condition
from spartito.ps.protocol.work import Lease, Totals
from spartito.ps.scheduler.progress import Settled
from spartito.ps.scheduler.queue import WorkQueue, WorkRange


class Readings:
    """What can be asked of the queues of all streams; ``changed`` is their lock.

    Who is among ``stopped`` has ended.
    """

    def __init__(
        self, changed: Condition, queues: Mapping[int, WorkQueue], stopped: Collection[int]
    ) -> None:
        self._changed, self._queues, self._stopped = changed, queues, stopped

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

    def _leases_of(self, worker: int) -> list[Lease | None]:
        """Those that are out, [None] if there are none. Called with the lock held."""
        held = [pair for queue in self._queues.values() for pair in queue.held()]
        return [lease for holder, lease in held if holder == worker] or [None]
