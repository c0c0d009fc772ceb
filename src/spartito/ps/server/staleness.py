"""How stale a push may be, and how stale the pushes were. Pure: no threads, no clock."""

from __future__ import annotations

from spartito.ps.protocol.rules import Rules


def rate_of(rules: Rules, staleness: int) -> float:
    """The factor of the learning rate for a stale push, where that is scaled.

    A gradient that is n times as stale as the bound moves the values 1/n as far. Without a bound
    that is a rate divided by the staleness (Zhang et al. 2016, arXiv:1511.05950).
    """
    limit = rules.max_staleness or 1
    if rules.on_stale != "scale" or staleness <= limit:
        return 1.0
    return limit / staleness


class Gate:
    """Grants pulls so that no push is ever staler than ``limit`` updates.

    Every outstanding pull (granted, and not pushed yet) satisfies: updates since that pull +
    other outstanding pulls <= limit. A push moves one from the second term to the first, so the
    sum grows by grants alone, and those are refused in time. With nobody outstanding a waiting
    worker can always be granted.
    """

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"a staleness of at most {limit}")
        self._limit = limit
        self._updates = 0
        self._outstanding: dict[int, int] = {}
        self._waiting: dict[int, None] = {}

    def ask(self, worker: int) -> None:
        """``worker`` wants to pull; what it pulled before and did not push is given up."""
        self._outstanding.pop(worker, None)
        self._waiting.setdefault(worker)

    def grantable(self) -> list[int]:
        """Who may be granted now, all of them, in the order of asking."""
        out = len(self._outstanding)
        free = self._limit + 1 - out
        for since in self._outstanding.values():
            free = min(free, self._limit - (self._updates - since) - (out - 1))
        return list(self._waiting)[: max(0, free)]

    def grant(self, worker: int, version: int) -> None:
        """``worker`` pulls now, after ``version`` updates of the parameters."""
        if worker not in self.grantable():
            raise ValueError(f"worker {worker} may not pull now")
        self._updates = max(self._updates, version)
        del self._waiting[worker]
        self._outstanding[worker] = self._updates

    def holds(self, worker: int) -> bool:
        """Whether ``worker`` has an outstanding pull, and so may push."""
        return worker in self._outstanding

    def push(self, worker: int) -> int:
        """``worker`` pushes what it pulled, which is an update; returns how stale it is.

        A push that updates nothing (known before, not finite) is a `release`.
        """
        if worker not in self._outstanding:
            raise ValueError(f"worker {worker} has no outstanding pull")
        staleness = self._updates - self._outstanding.pop(worker)
        self._updates += 1
        return staleness

    def release(self, worker: int) -> None:
        """``worker`` is idle or dead: it neither waits nor will it push."""
        self._outstanding.pop(worker, None)
        self._waiting.pop(worker, None)
