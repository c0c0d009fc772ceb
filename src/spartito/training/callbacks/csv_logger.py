"""Writes the figures of every epoch as a row of a CSV file."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Iterable
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
        self._resumed: int | None = None

    @property
    def is_device(self) -> bool:
        """Whether the path is none of a file that is kept, as ``/dev/stdout``."""
        return self.path.exists() and not self.path.is_file()

    def on_train_begin(self) -> None:
        """Make the file, and its folder, or read the header of the one to append to."""
        if not self.trainer.is_chief:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._check_own()
            goes_on = self._resumed is not None and self.path.exists()
            if not (self.append or goes_on) and (older := put_aside(self.path)):
                note("%s had the epochs of an earlier fit: they are in %s now", self.path, older)
            keeps = self.append or goes_on
            with self.path.open("a+" if keeps else "w+", newline="") as file:
                if keeps:
                    file.seek(0)
                lines = file.readlines() if keeps else []
                count = len(lines) if self._resumed is None else self._resumed
                self._columns, self._rows, size = _read(lines, count)
                if goes_on:
                    file.truncate(size)
                self._resumed = None
        except OSError as error:
            raise self._cannot(error) from error

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Add the row."""
        if not self.trainer.is_chief:
            return
        row = {"epoch": epoch + 1} | dict(logs)
        new = [name for name in row if name not in self._columns]
        try:
            if new and self._columns and (self.append or self.is_device):
                if not self._left_out.issuperset(new):
                    warn("%s has no column for %s", self.path, ", ".join(new))
                self._left_out.update(new)
            elif new:
                self._widen(new)
            with self.path.open("a", newline="") as file:
                csv.writer(file).writerow([row.get(name, "") for name in self._columns])
        except OSError as error:
            raise self._cannot(error) from error
        self._rows += 1

    def state_dict(self) -> dict[str, Any]:
        """How many rows are in the file."""
        return {"rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rows that came later are of epochs that are done again: they go when training begins."""
        self._resumed = state.get("rows", sys.maxsize)

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


def _read(lines: Iterable[str], count: int) -> tuple[list[str], int, int]:
    """The header, how many rows there are, ``count`` at most, and the bytes of both."""
    lines = list(lines)
    reader = csv.reader(lines)
    header = next(reader, [])
    rows = sum(1 for _ in zip(range(count), reader, strict=False))
    return header, rows, len("".join(lines[: reader.line_num]).encode())
