"""Logs for whom a task waits, so that no job is silent until its time limit.

At half of the limit the stacks of those who wait are written into the folder for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence

from spartito.heartbeat import dump_stacks
from spartito.names import listed
from spartito.notes import note

FIRST = 2.0  # seconds of the first wait that is logged
FACTOR = 10  # the next one that is logged is so many times longer
MOST = 5  # names in a line


class HalfTime:
    """Writes the stacks once half of the ``limit`` of a wait is over that another program makes.

    A thread looks, as such a wait tells nobody how long it takes. ``since`` is when it began, by
    `time.perf_counter`, None between two waits.
    """

    def __init__(self, limit: float) -> None:
        self.since: float | None = None
        self._limit, self._over = limit, threading.Event()
        threading.Thread(target=self._look, name="half time", daemon=True).start()

    def close(self) -> None:
        """No wait comes any more."""
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(self._limit / 20):
            since = self.since
            if since is not None and time.perf_counter() - since >= self._limit / 2:
                dump_stacks(f"half of the limit of {self._limit:g} s is over")
                return


class Waiting:
    """Logs the waits of rank ``rank`` of the tasks ``names``.

    A wait of ``after`` seconds is logged; then only one that is ten times longer, so that a task
    that is slow at every step does not fill the log.
    """

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self.after = FIRST
        self.enabled = True
        self._dumped = False
        self._rank = rank
        self._names = names

    def look(self, seconds: float, late: Collection[int], limit: float) -> None:
        """Take note that the ranks ``late`` have not come for ``seconds`` of at most ``limit``.

        Only the first of those who wait says so, and none unless ``enabled``.
        """
        if not self._dumped and seconds >= limit / 2:
            self._dumped = True
            dump_stacks(f"half of the limit of {limit:.0f} s is over")
        if seconds < self.after or not late:  # all may have come while they were looked for
            return
        self.after *= FACTOR
        if self.enabled and not set(range(self._rank)) - set(late):
            who = listed([self._names[rank] for rank in sorted(late)], MOST)
            note("waiting for %s, for %.0f s now; the limit is %.0f s", who, seconds, limit)
