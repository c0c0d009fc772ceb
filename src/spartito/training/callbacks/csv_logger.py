"""Writes the figures of every epoch as a row of a CSV file."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from spartito.aside import put_aside
from spartito.errors import UserError
from spartito.notes import note
from spartito.training.arguments import known_names
from spartito.training.callback import Callback, Logs

_START = b"epoch,"


class CSVLogger(Callback):
    """Writes one row per epoch into a CSV file; the first epoch gives the header.

    The chief alone writes, and every row is in the file when its epoch has ended.

    Args:
        filename: The file; its folder is made.
        append: Whether rows are added under the header that the file has; each fit starts the
            file anew otherwise, unless it is resumed, and an older one gets a number behind its
            name: ``epochs.csv.1``.

    Raises:
        UserError: The file cannot be written, or another job writes it.
    """

    @known_names("CSVLogger")
    def __init__(self, filename: str | os.PathLike[str], append: bool = False) -> None:
        """Remember the file; nothing is written before training begins."""
        self.path = Path(filename)
        self.append = append
        self._columns: list[str] = []
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
            with self.path.open("a+" if self.append or goes_on else "w+", newline="") as file:
                if goes_on:
                    file.truncate(min(self._resumed or 0, self.path.stat().st_size))
                self._resumed = None
                file.seek(0)
                self._columns = next(csv.reader(file), [])
        except OSError as error:
            raise self._cannot(error) from error

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Add the row."""
        if not self.trainer.is_chief:
            return
        row = {"epoch": epoch + 1} | dict(logs)
        header = [] if self._columns else [list(row)]
        self._columns = self._columns or list(row)
        try:
            with self.path.open("a", newline="") as file:
                csv.writer(file).writerows([*header, [row.get(name, "") for name in self._columns]])
        except OSError as error:
            raise self._cannot(error) from error

    def state_dict(self) -> dict[str, Any]:
        """How long the file is."""
        return {"size": self.path.stat().st_size if self.path.exists() else 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rows that came later are of epochs that are done again: they go when training begins."""
        self._resumed = state.get("size", 0)

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
