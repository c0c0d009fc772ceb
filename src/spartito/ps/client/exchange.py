"""What a task that computes does with the servers: push, go on, and take the answer later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from spartito.collectives.collective import Traffic
from spartito.ps.client.link import Restarted
from spartito.ps.client.servers import Servers
from spartito.ps.protocol.messages import Push

NONE, APPLIED, DUPLICATE, STALE, EXPIRED, RESTARTED = (
    "none", "applied", "duplicate", "stale", "expired", "restarted",
)  # fmt: skip
"""What became of a push: there was none; it counts; its pieces were known; it is to be computed
again; the others went on without it; a server was started again and has forgotten the lease."""
_WORST = (RESTARTED, EXPIRED, STALE)


class Exchange:
    """One push at a time, whose answer is awaited when the values are needed.

    Between a push and its answer the task does what needs no values: metrics, callbacks, and
    the reading of the next batch.
    """

    def __init__(self, servers: Servers, waits: bool) -> None:
        self.servers = servers
        self.waited = 0.0
        """Seconds that this task waited for the servers."""
        self._waits = waits
        self._waiting = False
        self._failed = False
        self._admitted = False

    @property
    def traffic(self) -> Traffic:
        """What went to the servers and came from them, through shared memory too."""
        sent = sum(link.sent for link in self.servers.links)
        received = sum(link.received for link in self.servers.links)
        return Traffic(sent, received, self.waited)

    def push(self, push: Push, absent: Sequence[Sequence[int]]) -> None:
        """Send what `Servers.fill` stored."""
        self._admitted = False  # until the answer is there
        try:
            self.servers.push(push, absent)
            self._waiting = True
        except Restarted:
            self._failed = True

    def arrive(self) -> str:
        """What became of the last push; the values that came with the answer are in the model."""
        found = {RESTARTED} if self._failed else set()
        waiting, self._waiting, self._failed = self._waiting, False, False
        if waiting:
            began = time.perf_counter()
            try:
                found = {answer.status for answer in self.servers.answers()}
                self._admitted = True
            except Restarted:
                found = {RESTARTED}
            self.waited += time.perf_counter() - began
        worst = next((status for status in _WORST if status in found), None)
        return worst or next(iter(found), NONE)

    def admit(self) -> None:
        """Have values to compute with; waits where none may get too stale."""
        began = time.perf_counter()
        while not self._admitted:
            with suppress(Restarted):  # then the server knows nothing of us yet: ask again
                self.servers.get(admit=True)
                self._admitted = True
        self.waited += time.perf_counter() - began

    def look(self) -> None:
        """Have the newest values, to evaluate or to save: until that is done we compute nothing."""
        self.rest()
        while True:
            with suppress(Restarted):
                return self.servers.get(admit=False)

    def rest(self) -> None:
        """There is nothing to compute for now: nobody needs to wait for us."""
        if self._admitted and self._waits:
            with suppress(Restarted):  # then it knows of nobody
                self.servers.release()
        self._admitted = False
