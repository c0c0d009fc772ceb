"""Whether sums beside backward are worth their thread, found out in a training's own updates."""

from __future__ import annotations

from statistics import median

TURN = 8
"""Updates in which a trial goes one way."""

SETTLING = 2
"""Of these the first ones, which do not count: memory is new."""

AGAIN = 1000
"""Updates after which there is a trial again: lines and neighbours change."""


class OverlapTrial:
    """Two ways that differ in time alone, one after the other; the faster one until the next trial.

    All replicas count the same updates, so that they know when one of them has to say what it has
    found. An update takes much the same time on all, as each waits for the others.
    """

    def __init__(self) -> None:
        self.overlaps = True
        """Whether sums leave beside backward in the next update."""
        self._updates = 0
        self._took: dict[bool, list[float]] = {True: [], False: []}

    def count(self, seconds: float | None, overlapped: bool) -> bool:
        """Take note of an update; whether the trial is over, so that all have to `settle` on a way.

        Args:
            seconds: From its first backward pass to the sums; None where that says nothing.
            overlapped: Whether sums left beside backward.
        """
        turn = self._updates % AGAIN
        self._updates += 1
        if turn < 2 * TURN:
            if seconds is not None and turn % TURN >= SETTLING:
                self._took[overlapped].append(seconds)
            self.overlaps = turn + 1 < TURN
        elif turn + 1 == AGAIN:
            self.overlaps = True
        return turn + 1 == 2 * TURN

    @property
    def found(self) -> bool:
        """Whether overlapping was the faster way here, or there is nothing to compare."""
        beside, after = self._took[True], self._took[False]
        return not beside or not after or median(beside) <= median(after)

    def settle(self, overlaps: bool) -> None:
        """Go this way until the next trial."""
        self.overlaps = overlaps
        self._took = {True: [], False: []}
