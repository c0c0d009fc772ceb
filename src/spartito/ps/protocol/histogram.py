"""How stale the pushes were, as counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Histogram:
    """How many pushes had which staleness."""

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self._counts: Counter[int] = Counter(counts or {})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and self._counts == other._counts

    __hash__ = None  # type: ignore[assignment]

    def add(self, staleness: int) -> None:
        """Count one push."""
        self._counts[staleness] += 1

    def merge(self, other: Histogram) -> None:
        """Count the pushes of ``other`` too."""
        self._counts.update(other._counts)

    @property
    def total(self) -> int:
        """How many pushes were counted."""
        return self._counts.total()

    @property
    def mean(self) -> float:
        """The mean staleness; 0 without pushes."""
        return sum(s * n for s, n in self._counts.items()) / max(1, self.total)

    @property
    def max(self) -> int:
        """The largest staleness; 0 without pushes."""
        return max((s for s, n in self._counts.items() if n), default=0)

    def to_dict(self) -> dict[str, int]:
        """The counts by staleness, smallest first, as JSON keeps them."""
        return {str(staleness): self._counts[staleness] for staleness in sorted(self._counts)}

    @classmethod
    def from_dict(cls, counts: Mapping[str, int]) -> Histogram:
        """What `to_dict` returned."""
        return cls({int(staleness): number for staleness, number in counts.items()})
