"""The options of an optimizer's groups by global step: the chief writes them, servers obey.

A server knows best which global step it is at, and the chief alone has a schedule that counts.
So the chief looks some way ahead and tells each server what options hold at which step; whoever
pushes has no say in it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spartito.ps.fields import Count
from spartito.ps.shard import settings

AHEAD = 256
"""Steps that the chief looks ahead; it looks again when half of them are over."""
MOST = 1 << 13
"""Row of single groups in a timetable at most, where there are many groups."""

Row = list[dict[str, Any]]
"""For each parameter group some of its options by name."""


class Timetable(msgspec.Struct, frozen=True):
    """``rows[i]`` holds at global step ``first + i``; the first one before, the last one after."""

    first: Count = 0
    rows: list[Row] = []

    def at(self, step: int) -> Row | None:
        """The options of a step; None where nothing was told."""
        if not self.rows:
            return None
        return self.rows[min(max(step - self.first, 0), len(self.rows) - 1)]


class Planner:
    """Writes the timetables of one optimizer, whose options the servers have as they are now.

    Only what has changed since is told: an optimizer may count in its groups (``k``, ``d``), and
    those counters are right on the servers alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.schedule: LRScheduler | None = None
        """Steps once per global step; None: nobody knows what comes."""
        self._optimizer = optimizer
        self.begin()

    def begin(self) -> None:
        """The servers have the options as they are now."""
        self._given = settings(self._optimizer)
        self._names: list[set[str]] = [set() for _ in self._given]
        self._table, self._until = Timetable(), 0

    def write(self, step: int) -> Timetable | None:
        """What to tell the servers at global step ``step``; None: what they know holds."""
        now, known = settings(self._optimizer), self._table.at(step)
        (row,) = self._rows([now])
        if (known or [{} for _ in now]) == row and (self.schedule is None or step < self._until):
            return None
        rows = self._rows([now, *self._foresee()])
        self._until = step + (len(rows) + 1) // 2
        while len(rows) > 1 and rows[-1] == rows[-2]:
            rows.pop()
        if rows == [known] == self._table.rows[-1:]:
            return None
        self._table = Timetable(step, rows)
        return self._table

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

    def _foresee(self) -> list[Row]:
        """The options of the steps to come, by a copy of the schedule on a copy of the groups."""
        if self.schedule is None:
            return []
        stand_in, found = _StandIn(self._optimizer), list[Row]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                schedule = copy.deepcopy(self.schedule, {id(self._optimizer): stand_in})
                for _ in range(max(1, min(AHEAD, MOST // len(self._given)))):
                    schedule.step()
                    found.append(settings(stand_in))
            except Exception:  # it ends here, or cannot be copied: told step by step then
                return found
        return found


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
