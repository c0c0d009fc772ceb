"""Writes the timetables of one optimizer: the chief looks ahead along its schedule."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spartito.ps.protocol.options import settings
from spartito.ps.protocol.timetable import Row, Timetable

BEGIN = 256
"""Steps that the chief looks ahead whenever something was not as foreseen."""
AHEAD = 4096
"""Steps that it looks ahead at first, as its first batch may take longer than a thousand of others,
and when there is time; it looks further when half of them are over."""
BEHIND = 64
"""Steps before the present one that are told again: for a server that is not so far yet."""
MOST = 1 << 14
"""Rows of single groups that the chief looks ahead at most, where there are many groups."""

_NEVER: tuple[Row | None, Row] = ([], [])


class Planner:
    """Writes the timetables of one optimizer, whose options the servers have as they are now.

    Only what has changed since is told: an optimizer may count in its groups (``k``, ``d``), and
    those counters are right on the servers alone.
    """

    def __init__(self, optimizer: Optimizer, every: int = 0) -> None:
        """``every``: so many updates are made before those who make them hear of news."""
        self.schedule: LRScheduler | None = None
        """Steps once per global step; None: nobody knows what comes."""
        self.ahead = 0
        """So many steps it leaves out first."""
        self.lock = threading.RLock()
        """To be held while a timetable is written and told."""
        self._optimizer = optimizer
        self._waits = 0  # the global step up to which the schedule waits
        self._ahead = every + max(1, min(AHEAD, MOST // max(1, len(optimizer.param_groups))))
        self._first = min(BEGIN + every, self._ahead)
        self.begin()

    def begin(self) -> None:
        """The servers have the options as they are now, and no timetable."""
        with self.lock:
            self._given = settings(self._optimizer)
            self._names: list[set[str]] = [set() for _ in self._given]
            self._table = Timetable()
            self._followed: LRScheduler | None = None
            self._forecast: Iterator[Row] = iter(())
            self._looked = _NEVER  # the row and the options that were found to agree

    def state_dict(self) -> dict[str, Any]:
        """What the servers were given, and the names of what has changed since."""
        with self.lock:
            return {"given": self._given, "names": [sorted(names) for names in self._names]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what another planner's `state_dict` returned: what it told is not known."""
        with self.lock:
            self._given, self._names = state["given"], [set(names) for names in state["names"]]
            self._followed, self._looked = None, _NEVER

    def write(self, step: int) -> Timetable | None:
        """What to tell the servers when the chief has come to global step ``step``.

        None: what they know holds.
        """
        with self.lock:
            if self._followed is self.schedule and self._is_known(step):
                return self._extended(step, max(step - BEHIND, self._table.first))
            if self.ahead:
                self._waits, self.ahead = step + self.ahead, 0
            size = self._first if self._followed is self.schedule else self._ahead
            self._followed, self._forecast = self.schedule, self._foresee(self._waits - step)
            now = settings(self._optimizer)
            rows = self._rows([now, *islice(self._forecast, size)])
            self._table = Timetable(step, rows)
            return Timetable(step, _cut_off(rows))

    def extend(self, step: int) -> Timetable | None:
        """As `write`, when the servers are at ``step`` already and the chief may be behind."""
        with self.lock:
            return self._extended(step, self._table.first)

    def _is_known(self, step: int) -> bool:
        """Whether the servers use the options at ``step`` that the optimizer has now."""
        looked = self._table.at(step), settings(self._optimizer)
        if looked[0] is self._looked[0] and looked[1] == self._looked[1]:
            return True  # as in most steps
        (now,) = self._rows([looked[1]])
        known = looked[0] or [{} for _ in now]
        found = all(
            row.get(name, given.get(name)) == value
            for row, given, group in zip(known, self._given, now, strict=True)
            for name, value in group.items()
        )
        self._looked = looked if found else _NEVER
        return found

    def _extended(self, step: int, keep: int) -> Timetable | None:
        """The timetable that goes on from ``step``, if there is news; ours begins at ``keep``."""
        first, rows = self._table.first, self._table.rows
        left = first + len(rows) - step
        if 2 * left > self._ahead or not (more := [*islice(self._forecast, self._ahead - left)]):
            return None
        last, rows = rows[-1], rows[keep - first :] + self._rows(more)
        self._table = Timetable(keep, rows)
        begin = max(step - BEHIND, keep)
        told = _cut_off(rows[begin - keep :])
        return None if told == [last] else Timetable(begin, told)

    def counters(self, served: Row) -> Row:
        """What of a server's options is not the schedule's, but the optimizer's own."""
        return [
            {name: value for name, value in group.items() if name not in names}
            for group, names in zip(served, self._names, strict=True)
        ]

    def _rows(self, steps: Sequence[Row]) -> list[Row]:
        """Of each step's options those that are, or will be, changed here."""
        for step in steps:
            for names, group, given in zip(self._names, step, self._given, strict=True):
                names.update(name for name in group if group[name] != given.get(name))
        return [
            [
                {name: group[name] for name in sorted(names & group.keys())}
                for names, group in zip(self._names, step, strict=True)
            ]
            for step in steps
        ]

    def _foresee(self, ahead: int) -> Iterator[Row]:
        """The options of the steps to come, by a copy of the schedule on a copy of the groups.

        The first ``ahead`` have those of now.

        None where it cannot be copied, and none after its end: these are told step by step.
        """
        if self.schedule is None:
            return iter(())
        stand_in = _StandIn(self._optimizer)
        try:
            schedule = copy.deepcopy(self.schedule, {id(self._optimizer): stand_in})
        except Exception:
            return iter(())
        return chain(repeat(settings(stand_in), max(0, ahead)), _steps(schedule, stand_in))


def _cut_off(rows: Sequence[Row]) -> list[Row]:
    """The rows without those at the end that say the same again: the last one holds."""
    size = len(rows)
    while size > 1 and rows[size - 1] == rows[size - 2]:
        size -= 1
    return list(rows[:size])


def _steps(schedule: LRScheduler, stand_in: _StandIn) -> Iterator[Row]:
    """What the groups have after each step of the schedule, up to its end."""
    while True:
        try:
            schedule.step()
        except Exception:
            return
        yield settings(stand_in)


class _StandIn(Optimizer):
    """The groups of an optimizer without its parameters, for a schedule to work on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.defaults = optimizer.defaults
        self.param_groups = [
            {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in optimizer.param_groups
        ]
        # Its steps are made on the servers: torch need not warn of schedules before the first.
        self._opt_called = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: there are no parameters."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
