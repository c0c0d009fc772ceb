"""When a backup is due: after so many steps, so many seconds, or each epoch."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar, Protocol

from spartito.errors import UserError
from spartito.numeric import is_whole

NEVER = sys.maxsize
GROWTH = 4
"""The next meeting is at most so many times as far away as is known how long steps take."""

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Interval(Protocol):
    """When backups are due. Tasks meet at steps that they know before: no step asks."""

    at_epochs: ClassVar[bool] = True
    """Whether they meet at the end of each epoch too."""

    def begin(self, step: int) -> int:
        """Training begins after ``step``; returns the step of the first meeting."""
        ...

    def meet(self, step: int) -> tuple[bool, int]:
        """At a meeting, or the end of an epoch: whether one is due, and the next meeting."""
        ...


@dataclass(frozen=True)
class BySteps(Interval):
    """Every so many global steps."""

    at_epochs = False
    steps: int

    def begin(self, step: int) -> int:
        """The next multiple."""
        return (step // self.steps + 1) * self.steps

    def meet(self, step: int) -> tuple[bool, int]:
        """Every meeting is one."""
        return True, self.begin(step)


class ByEpochs(Interval):
    """At the end of every epoch."""

    def begin(self, step: int) -> int:
        """No step is one."""
        return NEVER

    def meet(self, step: int) -> tuple[bool, int]:
        """An epoch has ended."""
        return True, NEVER


@dataclass
class BySeconds(Interval):
    """Every so many seconds; steps tell how long they take, so that all tasks meet in time."""

    seconds: float
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    _first: int = 0
    _began: float = 0.0
    _last: float = 0.0

    def begin(self, step: int) -> int:
        """After the first step, which takes longer."""
        self._first, self._began = step + 1, 0.0
        self._last = self.clock()
        return step + 1

    def meet(self, step: int) -> tuple[bool, int]:
        """Due if the time is over, or would be within half a step; else how far it is."""
        now = self.clock()
        self._began = self._began or now
        known = step - self._first
        each = (now - self._began) / known if known > 0 else 0.0
        due = now + each / 2 >= self._last + self.seconds
        if due:
            self._last = now
        most = max(1, (GROWTH - 1) * known)
        left = self._last + self.seconds - now
        return due, step + (min(most, max(1, round(left / each))) if each else 1)


def interval_of(every: int | float | str | timedelta) -> Interval:
    """The interval that a user asks for; `UserError` for what is none."""
    if isinstance(every, timedelta):
        every = f"{every.total_seconds()}s"
    if is_whole(every) and every > 0:
        return BySteps(every)
    if every == "epoch":
        return ByEpochs()
    found = re.fullmatch(r"(\d+(?:\.\d*)?)([smh])", every) if isinstance(every, str) else None
    if found and (seconds := float(found[1]) * UNITS[found[2]]) > 0:
        return BySeconds(seconds)
    raise UserError(
        f"every={every!r}", 'Give global steps (100), a time ("30s", "5m", a timedelta) or "epoch".'
    )
