"""Which values a task has already."""

from __future__ import annotations


class Editions:
    """When the values of each run changed last; called with the store's lock held."""

    def __init__(self, runs: int) -> None:
        self.now = 0
        """Grows whenever values change, by whatever cause."""
        self._changed = [0] * runs  # the edition of each run's values

    def note(self, but: frozenset[int] = frozenset()) -> None:
        """The values of all runs but these are others than before."""
        self.now += 1
        for number in range(len(self._changed)):
            if number not in but:
                self._changed[number] = self.now

    def unchanged(self, since: int) -> frozenset[int]:
        """The runs, by index, whose values are those that they had at edition ``since``."""
        if min(self._changed, default=0) > since:  # as after most pushes
            return frozenset()
        return frozenset(n for n, edition in enumerate(self._changed) if edition <= since)
