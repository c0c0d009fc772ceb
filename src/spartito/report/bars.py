"""Bars of a page: what they are called, how long they are, and what stands at their ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spartito.report.figures import percent


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its name, its length as a fraction of the longest, the words at its end.

    ``span`` is from where to where repeats reach, as fractions like the length; None without any.
    """

    name: str
    fraction: float
    value: str
    paint: str
    span: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars under one title, and a sentence on what they are."""

    title: str
    rows: Sequence[Bar]
    note: str = ""


def staleness_bars(title: str, pushes: Mapping[int, int], paint: str) -> Bars:
    """How late gradients came: ``pushes`` by their staleness in updates."""
    counts = {late: count for late, count in sorted(pushes.items()) if count}
    total, most = sum(counts.values()), max(counts.values(), default=0)
    return Bars(
        title,
        [Bar(str(n), count / most, percent(count / total), paint) for n, count in counts.items()],
        "By how many updates a gradient came late, and the fraction of the pushes that did.",
    )
