"""Where a chief writes down what it must not forget: records in a file, each whole or not there."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol

from spartito.cluster.store.journal import framed, records
from spartito.errors import TaskLostError
from spartito.notes import warn
from spartito.storage.atomic import write_all

LOCK_SECONDS = 5.0
"""How long the process that wrote it before may take to end."""


class Journal(Protocol):
    """Records in a row."""

    size: int
    """Bytes that were written since the last `rewrite`."""

    def read(self) -> list[bytes]:
        """All records that are whole."""
        ...

    def append(self, record: bytes) -> None:
        """Write one more; it is there when this returns, whatever becomes of the process."""

    def rewrite(self, record: bytes) -> None:
        """Have ``record`` alone instead of all others."""

    def remove(self) -> None:
        """The job has ended."""


class NoJournal(Journal):
    """Nothing is kept: the death of the chief ends the job."""

    size = 0

    def read(self) -> list[bytes]:
        return []

    def append(self, record: bytes) -> None:
        """Nothing."""

    def rewrite(self, record: bytes) -> None:
        """Nothing."""

    def remove(self) -> None:
        """Nothing."""


class FileJournal(Journal):
    """In a file of this machine, which one process at a time may have.

    It survives the death of the process, not that of the machine. Where it cannot be written it
    is removed, and a warning says so: a chief that goes on from half of it would do harm.
    """

    def __init__(self, path: Path) -> None:
        """Raise `TaskLostError` while another process has it."""
        self._path, self.size = path, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _open(path.with_suffix(".lock"), os.O_RDWR)
        self._take_lock()
        self._file: int | None = _open(path, os.O_WRONLY | os.O_APPEND)

    def read(self) -> list[bytes]:
        with self._path.open("rb") as file:
            return list(records(file))

    def append(self, record: bytes) -> None:
        if self._file is None:
            return
        data = framed(record)
        try:
            write_all(self._file, data)
            self.size += len(data)
        except OSError as error:
            self._give_up(error)

    def rewrite(self, record: bytes) -> None:
        if self._file is None:
            return
        fresh = self._path.with_suffix(".new")
        try:
            with suppress(FileNotFoundError):
                fresh.unlink()
            file = _open(fresh, os.O_WRONLY | os.O_APPEND | os.O_EXCL)
            try:
                write_all(file, framed(record))
                fresh.rename(self._path)
            except BaseException:
                os.close(file)
                raise
            os.close(self._file)
            self._file, self.size = file, 0
        except OSError as error:
            self._give_up(error)

    def remove(self) -> None:
        for suffix in (".new", self._path.suffix, ".lock"):
            self._path.with_suffix(suffix).unlink(missing_ok=True)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _take_lock(self) -> None:
        end = monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if monotonic() > end:
                    raise TaskLostError(
                        f"another process is the chief: it has {self._path} open",
                        "End it first; one that is stopped goes on when it is let go.",
                    ) from None
                sleep(0.05)

    def _give_up(self, error: OSError) -> None:
        warn(
            "the chief's journal %s cannot be written: %s; from now on its death ends the job",
            self._path, error.strerror,
        )  # fmt: skip
        self.remove()


def _open(path: Path, how: int) -> int:
    return os.open(path, how | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
