"""What a run's settings say of its parameter servers: who holds what, and how late pushes came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spartito.report.figures import percent


@dataclass(frozen=True)
class Bar:
    """A staleness, how long its bar is (1 for the longest), and its share of the pushes."""

    name: str
    share: float
    value: str


def holdings(config: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Rows of server, tensor, which part of it, size; empty where there are no servers."""
    rows = config.get("servers")
    return [tuple(map(str, row)) for row in rows] if isinstance(rows, list) else []


def lateness(config: Mapping[str, Any]) -> list[Bar]:
    """The share of the pushes that came so many updates late."""
    found = config.get("staleness")
    counts = {int(late): int(n) for late, n in found.items()} if isinstance(found, dict) else {}
    total, most = sum(counts.values()), max(counts.values(), default=0)
    return [
        Bar(str(late), counts[late] / most, percent(counts[late] / total))
        for late in sorted(counts)
        if counts[late]
    ]
