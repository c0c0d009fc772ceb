"""A set of whole numbers that mostly lie side by side, kept as ranges."""

from __future__ import annotations

from collections.abc import Iterator


class Ranges:
    """Disjoint half-open ranges ``(start, stop)`` in order; neighbours that touch are one."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._spans)

    def __bool__(self) -> bool:
        return bool(self._spans)

    def __contains__(self, number: int) -> bool:
        return any(start <= number < stop for start, stop in self._spans)

    def add(self, start: int, stop: int) -> None:
        """Put the numbers of ``[start, stop)`` in; those that are in stay."""
        if start >= stop:
            return
        below = [span for span in self._spans if span[1] < start]
        above = [span for span in self._spans if span[0] > stop]
        touched = self._spans[len(below) : len(self._spans) - len(above)]
        if touched:
            start, stop = min(start, touched[0][0]), max(stop, touched[-1][1])
        self._spans = [*below, (start, stop), *above]

    def remove(self, start: int, stop: int) -> None:
        """Take the numbers of ``[start, stop)`` out, as far as they are in."""
        if start >= stop:
            return
        parts = []
        for first, last in self._spans:
            parts += [(first, min(last, start)), (max(first, stop), last)]
        self._spans = [part for part in parts if part[0] < part[1]]

    def overlap(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The ranges of numbers of ``[start, stop)`` that are in."""
        cut = [(max(first, start), min(last, stop)) for first, last in self._spans]
        return [part for part in cut if part[0] < part[1]]

    def within(self, start: int, stop: int) -> int:
        """How many numbers of ``[start, stop)`` are in."""
        return sum(last - first for first, last in self.overlap(start, stop))

    def frontier(self) -> int:
        """The first number from 0 on that is not in."""
        return self._spans[0][1] if self._spans and self._spans[0][0] <= 0 else 0

    def end(self) -> int:
        """One more than the largest number that is in; 0 if there is none."""
        return self._spans[-1][1] if self._spans else 0
