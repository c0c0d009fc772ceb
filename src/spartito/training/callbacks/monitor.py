"""One figure of an epoch's logs that is watched, and which of two values is the better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from spartito.errors import UserError
from spartito.names import nearest
from spartito.report.figures import BOOKKEEPING, VALIDATION, higher_is_better, scalars

MODES = ("auto", "min", "max")


@dataclass(frozen=True)
class Monitor:
    """Watches ``name``; ``mode`` is "min", "max", or "auto": accuracies up, all else down."""

    name: str
    mode: str = "auto"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        """Raise `UserError` for a mode that does not exist."""
        if self.mode not in MODES:
            raise UserError(f"mode is {self.mode!r}", nearest(self.mode, MODES))

    @property
    def higher(self) -> bool:
        """Whether more is better."""
        return self.mode == "max" or (self.mode == "auto" and higher_is_better(self.name))

    def read(self, logs: Mapping[str, float]) -> float:
        """Its value in ``logs``; a `UserError` that names the known ones when it is not there."""
        value = logs.get(self.name)
        if isinstance(value, int | float):
            return float(value)
        if value is not None:
            raise UserError(
                f"monitor is {self.name!r}, which has several values", "Watch a single figure."
            )
        known = [name for name in scalars(logs) if name not in BOOKKEEPING]
        hint = nearest(self.name, known)
        if self.name.startswith(VALIDATION) and not any(n.startswith(VALIDATION) for n in known):
            hint += " This fit has no validation_data."
        raise UserError(f"monitor is {self.name!r}, which no epoch reports", hint)

    def better(self, value: float, best: float | None) -> bool:
        """Whether ``value`` beats ``best`` by more than ``min_delta``; NaN beats nothing."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value - best > self.min_delta if self.higher else best - value > self.min_delta
