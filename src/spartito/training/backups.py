"""Where the backups of one fit lie, and which training they are of."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from spartito.checkpoint.manager import CheckpointManager
from spartito.errors import UserError
from spartito.storage.atomic import read_manifest, sweep

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
    """The folder of the backups of a trainer's ``fit``-th fit, from 1, beside those of others."""
    return f"fit-{fit}"


class LocalBackups(Backups):
    """Those in a folder that all machines share, or that is on this one, where all tasks are.

    Args:
        directory: A folder for them alone; it is made.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._manager = CheckpointManager(directory, KEPT)

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
        if not self.directory.exists():
            return
        aside = self.directory.with_name(f".{self.directory.name}.{secrets.token_hex(4)}.new")
        self.directory.rename(aside)  # at once: no part of them is ever taken for the newest
        shutil.rmtree(aside, ignore_errors=True)
        sweep(self.directory.parent)


def check_training(path: Path, now: Mapping[str, Any]) -> None:
    """Refuse a backup of another training; ``now`` says what this one is of, as JSON."""
    then = read_manifest(path).about.get(OF) or {}
    for key, value in now.items():
        if then.get(key) != value:
            raise UserError(
                f"{path} is the backup of another training: {key} was {then.get(key)!r} there, "
                f"and is {value!r} now",
                "Run what was interrupted again, remove the backup to begin anew, or name "
                "another directory.",
            )
