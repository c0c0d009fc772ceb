"""Writes the figures of every epoch as a row of a CSV file."""

from __future__ import annotations

import csv
import io
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spartito.aside import put_aside
from spartito.errors import UserError
from spartito.notes import note, warn
from spartito.storage.atomic import write_file_atomically
from spartito.training.arguments import known_names
from spartito.training.callback import Callback, Logs

_START = b"epoch,"


class CSVLogger(Callback):
    """Writes one row per epoch into a CSV file, under a header with the figures' names.

    The chief alone writes, and every row is in the file when its epoch has ended. A figure that
    begins in a later epoch gets a column at the end, empty in the rows before; so is the cell of
    one that an epoch did not report.

    Args:
        filename: The file; its folder is made.
        append: Whether rows are added under the header that the file has, which stays as it is:
            a warning names figures without a column. Each fit starts the file anew otherwise,
            unless it is resumed, and an older one gets a number behind its name:
            ``epochs.csv.1``.

    Raises:
        UserError: The file cannot be written, or another job writes it.
    """

    @known_names("CSVLogger")
    def __init__(self, filename: str | os.PathLike[str], append: bool = False) -> None:
        """Remember the file; nothing is written before training begins."""
        self.path = Path(filename)
        self.append = append
        self._columns: list[str] = []
        self._rows = 0
        self._left_out: set[str] = set()
        self._last: list[str] = []
        self._resumed: tuple[int, list[str] | None] | None = None

    @property
    def is_device(self) -> bool:
        """Whether the path is none of a file that is kept, as ``/dev/stdout``."""
        return self.path.exists() and not self.path.is_file()

    def on_train_begin(self) -> None:
        """Make the file, and its folder, or read the header of the one to append to."""
        if not self.trainer.is_chief:
            return
        resumed, self._resumed = self._resumed, None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._check_own()
            went_on, is_changed = self.trainer.went_on, False
            goes_on = went_on or (resumed is not None and self.path.exists())
            table = self._table() if self.append or goes_on else _Table()
            if went_on:  # the process that wrote it is gone, and this one has counted no rows
                is_changed = table.keep_until(self.trainer.epoch)
            elif goes_on and resumed is not None:
                goes_on = table.has(*resumed)
                is_changed = goes_on and table.drop(resumed[0], all_=not self.append)
            if not (self.append or goes_on):
                table = _Table()
                if older := put_aside(self.path):
                    note("%s had the epochs of another fit: they are in %s now", self.path, older)
            with self.path.open("a" if self.append or goes_on else "w", newline=""):
                pass  # it can be written
            if is_changed:
                write_file_atomically(self.path.resolve(), "".join(table.lines))
            self._columns, self._rows, self._last = table.header, len(table.rows), table.last
        except OSError as error:
            raise self._cannot(error) from error

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Add the row."""
        if not self.trainer.is_chief:
            return
        if self.trainer.went_on and self._last[:1] == [str(epoch + 1)]:
            return  # who was lost has written it
        row = {"epoch": epoch + 1} | dict(logs)
        new = [name for name in row if name not in self._columns]
        try:
            if new and self._columns and (self.append or self.is_device):
                if not self._left_out.issuperset(new):
                    warn("%s has no column for %s", self.path, ", ".join(new))
                self._left_out.update(new)
            elif new:
                self._widen(new)
            cells = ["" if (cell := row.get(name)) is None else str(cell) for name in self._columns]
            with self.path.open("a", newline="") as file:
                csv.writer(file).writerow(cells)
        except OSError as error:
            raise self._cannot(error) from error
        self._rows, self._last = self._rows + 1, cells

    def state_dict(self) -> dict[str, Any]:
        """How many rows are in the file, and the last of them."""
        return {"rows": self._rows, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rows that came later are of epochs that are done again: they go when training begins.

        Those of another training, which had the file meanwhile, stay.
        """
        self._resumed = state.get("rows", sys.maxsize), state.get("last")

    def _table(self) -> _Table:
        """What is in the file."""
        if not self.path.is_file():
            return _Table()
        with self.path.open(newline="") as file:
            return _Table.of(file.readlines())

    def _widen(self, new: list[str]) -> None:
        """Give the file these columns, at the end of a header that may be none yet."""
        if not self._columns:
            with self.path.open("a", newline="") as file:
                csv.writer(file).writerow(new)
        else:
            with self.path.open(newline="") as file:
                header, *rows = csv.reader(file)
            out = io.StringIO(newline="")
            csv.writer(out).writerows(
                [[*header, *new], *([*row, *[""] * len(new)] for row in rows)]
            )
            write_file_atomically(self.path.resolve(), out.getvalue())
        self._columns += new

    def _check_own(self) -> None:
        """Refuse to replace a file that is no history of epochs."""
        if self.append or not self.path.is_file():
            return
        with self.path.open("rb") as file:
            start = file.read(len(_START))
        if start != _START[: len(start)]:
            raise UserError(
                f"{self.path} was not written by CSVLogger, and would be replaced: its first "
                "column is not 'epoch'",
                "Name another file, or write CSVLogger(..., append=True).",
            )

    def _cannot(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path} cannot be written: {error.strerror}", "Name another file for CSVLogger."
        )


@dataclass
class _Table:
    """What a CSV file has: its lines, and the cells of its rows, of which each ends some line."""

    lines: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, lines: list[str]) -> _Table:
        reader = csv.reader(lines)
        found = cls(lines, next(reader, []))
        found.ends = [reader.line_num]  # the header's comes first
        for row in reader:
            found.rows.append(row)
            found.ends.append(reader.line_num)
        return found

    @property
    def last(self) -> list[str]:
        return self.rows[-1] if self.rows else []

    def has(self, count: int, last: list[str] | None) -> bool:
        """Whether the row of this number is this one; columns may have come since.

        An earlier version has not told which it was.
        """
        if last is None or not count:
            return True
        row = self.rows[count - 1] if count <= len(self.rows) else []
        return row[: len(last)] == last and not any(row[len(last) :])

    def keep_until(self, epoch: int) -> bool:
        """Leave out rows at the end that are of later epochs, or were not written to their end.

        Returns:
            Whether there were any.
        """
        before = len(self.lines)
        while self.rows and (not self.lines[-1].endswith("\n") or _epoch(self.rows[-1]) > epoch):
            self.rows.pop()
            self.ends.pop()
            self.lines = self.lines[: self.ends[-1]]
        return len(self.lines) < before

    def drop(self, count: int, all_: bool) -> bool:
        """Leave out rows behind so many: all, or those whose epochs go on from there.

        Returns:
            Whether there were any.
        """
        end = len(self.rows)
        if not all_:
            end = min(count, end)
            while 0 < end < len(self.rows) and _follows(self.rows[end - 1], self.rows[end]):
                end += 1
        if end <= count:
            return False
        self.lines = self.lines[: self.ends[count]] + self.lines[self.ends[end] :]
        self.rows = self.rows[:count] + self.rows[end:]
        return True


def _follows(one: list[str], other: list[str]) -> bool:
    """Whether a row is of the epoch after that of another."""
    return 0 <= _epoch(one) == _epoch(other) - 1


def _epoch(row: list[str]) -> int:
    """The epoch that a row is of, from 1; -1 where it does not say."""
    return int(row[0]) if row and row[0].isdigit() else -1
