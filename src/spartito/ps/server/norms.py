"""How large gradients are, so that one out of all proportion does not go unseen."""

from __future__ import annotations

from math import exp, log

ABSURD = 1000.0
"""So many times as large as usual is worth a warning."""

KNOWN = 20
"""Gradients that must have come before anything is usual."""

SHARE = 0.05
"""What each gradient counts for what is usual."""


class GradientNorms:
    """The norms of the gradients that came; the usual one is their geometric mean of late."""

    def __init__(self) -> None:
        self.largest = 0.0
        self._count = 0
        self._log = 0.0
        self._limit = 0.0

    @property
    def usual(self) -> float:
        """The norm that most have, about."""
        return exp(self._log)

    def is_absurd(self, norm: float) -> bool:
        """Whether a gradient is far larger than those before it."""
        return self._count >= KNOWN and norm > self._limit

    def add(self, norm: float) -> None:
        """Take note of a gradient."""
        if norm > self.largest:
            self.largest = norm
        if norm > 0:
            self._count += 1
            self._log += (log(norm) - self._log) * max(SHARE, 1 / self._count)
            self._limit = ABSURD * exp(self._log)
