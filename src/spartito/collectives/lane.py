"""Sums that run beside the computation: a group of tasks with a thread of its own."""

from __future__ import annotations

import queue
import threading
import time

import torch

from spartito.collectives.calls import CurrentCall
from spartito.collectives.collective import Collective
from spartito.collectives.standing_sum import StandingSum, Summing, Work, exact, standing_sum
from spartito.errors import UserError
from spartito.heartbeat import resume, waits

_PATIENCE = 5.0  # seconds that `Lane.close` waits for its thread


class Lane:
    """A group of tasks whose sums run in a thread, one after the other, in the order given.

    All tasks give the same work in the same order, each when it is ready. The group is used for
    nothing else, so that this order is all that matters.

    Args:
        group: Of sockets, or of sockets between machines.
    """

    def __init__(self, group: Collective) -> None:
        self.group = group
        self._begun = self._ended = 0
        self._waited, self._counted = 0.0, (0, 0)  # bytes that are in another group's traffic
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_open = True
        group.follow(CurrentCall())  # not that of the calls that the main thread makes

    def standing_sum(self, numel: int, dtype: torch.dtype, summing: Summing = exact) -> StandingSum:
        """As `spartito.collectives.standing_sum.standing_sum`: one that `begin` can run."""
        return standing_sum(self.group, numel, dtype, summing)

    def begin(self, work: Work) -> int:
        """Let the thread do ``work`` once all before is done; returns its number."""
        if not self.is_open:
            raise UserError("a call to other tasks after close()", "Make a new strategy.")
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._work, self._done), name="spartito-lane", daemon=True
            )
            self._thread.start()
        self._begun += 1
        self._work.put(work)
        return self._begun

    def run(self, work: Work) -> None:
        """Do ``work`` in the calling thread, once all before is done."""
        self.wait()
        began, before = time.perf_counter(), waits()
        work()
        self._waited += time.perf_counter() - began
        resume(before)

    def wait(self, number: int | None = None) -> None:
        """Return when the work of this number is done, or all, and raise what was raised there."""
        began, before = time.perf_counter(), waits()
        failed: BaseException | None = None
        while self._ended < (self._begun if number is None else number):
            failed = self._done.get() or failed
            self._ended += 1
        self._waited += time.perf_counter() - began
        resume(before)
        if failed is not None:
            raise failed

    def count_for(self, group: Collective) -> None:
        """Count what was sent and received, and the last `wait`, as the traffic of ``group``."""
        own, total = self.group.traffic, group.traffic
        # The thread may count on meanwhile: it alone writes there.
        counted, self._counted = self._counted, (own.sent, own.received)
        total.sent += self._counted[0] - counted[0]
        total.received += self._counted[1] - counted[1]
        total.waited += self._waited
        total.compression_error = own.compression_error
        self._waited = 0.0

    def close(self) -> None:
        """End the thread, also one that waits for others. May be called again."""
        self.is_open = False
        if self._thread is None or not self._thread.is_alive():
            return
        self._work.put(None)
        self._thread.join(0 if self._ended < self._begun else _PATIENCE)
        if self._thread.is_alive():
            self.group.interrupt()
            self._thread.join(_PATIENCE)


def _serve(
    todo: queue.SimpleQueue[Work | None], done: queue.SimpleQueue[BaseException | None]
) -> None:
    """Do what comes; after an error the group is of no use, and the rest is not begun."""
    failed: BaseException | None = None
    while (work := todo.get()) is not None:
        if failed is None:
            try:
                work()
            except BaseException as error:  # raised by `Lane.wait`, in the thread that waits
                failed = error
        done.put(failed)
        del work
