"""Where the backups of one fit lie, and which training they are of."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from spartito.checkpoint.manager import CheckpointManager
from spartito.errors import UserError
from spartito.storage.atomic import read_manifest, sweep
from spartito.training.backups.identity import EXAMPLES, OPTIONS, other_option

OF = "backup"
"""What a manifest says of the training; also the section with what a checkpoint lacks."""

BACKUPS = Path("backup")
"""Where they are in a run folder."""

KEPT = 2
"""The newest, and the one before it, should a disk damage the newest."""


class Backups(Protocol):
    """The backups of one fit."""

    directory: Path
    """Where they are written, on the chief's machine."""

    def newest(self) -> str:
        """The name of the newest that is whole, which is to be fetched; empty: there is none."""
        ...

    def fetch(self, name: str) -> Path:
        """Where this task reads it."""
        ...

    def path_of(self, name: str) -> Path:
        """Where that is, whether it is there or not."""
        ...

    def release(self) -> None:
        """It was read."""
        ...

    def where(self, name: str) -> str:
        """What a user calls it."""
        ...

    def begin(self, name: str) -> dict[str, Any]:
        """Before one is written, on the chief: what its manifest is to say."""
        ...

    def end(self, name: str) -> None:
        """After it: the oldest go."""
        ...

    def remove(self) -> None:
        """All of them, as the training is complete."""
        ...


def folder_of(fit: int) -> str:
    """The folder of the backups of a script's ``fit``-th fit there, from 1, beside the others."""
    return f"fit-{fit}"


class LocalBackups(Backups):
    """Those in a folder that all machines share, or that is on this one, where all tasks are.

    Args:
        directory: A folder for them alone; it is made.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._manager = CheckpointManager(directory, KEPT, alone=True)

    def newest(self) -> str:
        self._manager.prepare()
        found = self._manager.latest()
        return found.name if found else ""

    def fetch(self, name: str) -> Path:
        return self.directory / name

    def path_of(self, name: str) -> Path:
        return self.directory / name

    def release(self) -> None:
        pass

    def where(self, name: str) -> str:
        return str(self.directory / name)

    def begin(self, name: str) -> dict[str, Any]:
        return self._manager.begin(name)

    def end(self, name: str) -> None:
        self._manager.end(name)

    def remove(self) -> None:
        self._manager.remove_all()
        sweep(self.directory)
        with suppress(OSError):  # it is not there, or holds what others put there
            self.directory.rmdir()


def check_training(path: Path, now: Mapping[str, Any]) -> None:
    """Refuse a backup of another training; ``now`` says what this one is of, as JSON."""
    then = read_manifest(path).about.get(OF) or {}
    for key, value in now.items():
        if key not in (OPTIONS, EXAMPLES) and then.get(key) != value:
            raise _other(path, key, then.get(key), value)
    # Earlier versions have not written these, and of some data nothing can be said.
    if other := other_option(then.get(OPTIONS) or (), now.get(OPTIONS) or ()):
        raise _other(path, *other)
    pairs = zip(then.get(EXAMPLES) or (), now.get(EXAMPLES) or (), strict=False)
    if any(old != new for old, new in pairs):
        raise UserError(f"{path} is the backup of another training: its data was another", _ADVICE)


_ADVICE = (
    "Run what was interrupted again, remove the backup to begin anew, or name another directory: "
    "one for each fit, where a script leaves out those that are done."
)


def _other(path: Path, what: str, then: Any, now: Any) -> UserError:
    return UserError(
        f"{path} is the backup of another training: {what} was {then!r} there, and is {now!r} now",
        _ADVICE,
    )
