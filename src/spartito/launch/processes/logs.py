"""A file for each task with all that it prints, as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from spartito.aside import put_aside
from spartito.errors import UserError


class TaskLog:
    """The file of one task. ``again``: the task is started again, and the file is continued.

    A file of an earlier job, or of a user, gets a number behind its name: ``worker-0.log.1``.

    Raises `UserError` where the file cannot be opened. When it cannot be written later (the disk
    is full), ``say`` gets one line and the job continues without it.
    """

    def __init__(self, path: Path, again: bool, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        try:
            if not again:
                put_aside(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise refused(path, error) from error

    def write(self, lines: Sequence[bytes]) -> None:
        """Append ``lines``, at once."""
        rest = memoryview(b"".join(lines))
        try:
            while rest and not self._file.closed:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.close()
            self._say(f"{self._path} cannot be written any more: {error.strerror}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def refused(path: Path, error: OSError) -> UserError:
    """The error for a file or folder that cannot be written."""
    return UserError(
        f"--log-dir: {path} cannot be written: {error.strerror}",
        "Name a folder where you may write.",
    )
