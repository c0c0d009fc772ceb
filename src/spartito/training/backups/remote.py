"""Backups in a store that is no file system of this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from spartito.checkpoint.in_store import LocalCopies, put
from spartito.errors import UserError
from spartito.notes import warn
from spartito.storage.remote import (
    Store,
    UnreadableError,
    new_name,
    remove_all,
    remove_older,
    whole_ones,
)
from spartito.training.backups.folder import KEPT, Backups


class RemoteBackups(Backups):
    """Those in a store where nothing can be renamed, see `spartito.checkpoint.in_store`.

    Args:
        store: Where they lie, and nothing else.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._upload = store, ""
        self._copies = LocalCopies(store)
        self.directory = self._copies.written

    def newest(self) -> str:
        self._copies.prepare()
        shutil.rmtree(self.directory, ignore_errors=True)  # of a run that was killed
        for name, _ in reversed(whole_ones(self._store)):
            try:
                self.fetch(name)
            except UnreadableError:  # it may be whole: an older one would be another training
                raise
            except UserError as error:
                warn("%s is passed over: %s", name, error)
            else:
                return name
        return ""

    def fetch(self, name: str) -> Path:
        return self._copies.fetch(name)

    def path_of(self, name: str) -> Path:
        return self._copies.path_of(name)

    def release(self) -> None:
        """Remove what was downloaded, unless another task of this machine still reads it."""
        self._copies.release()

    def where(self, name: str) -> str:
        return f"{self._store.url}/{name}".rstrip("/")

    def begin(self, name: str) -> dict[str, Any]:
        self._upload = new_name(name)
        return {"sequence": self._copies.next_number()}

    def end(self, name: str) -> None:
        put(self._store, self.directory / name, self._upload)
        try:
            whole = [each for each, _ in whole_ones(self._store)]
            remove_older(self._store, {self._upload, *whole[-KEPT:]}, KEPT)
        except UserError as error:  # the next turn tries it again
            warn("older backups are left: %s", error)

    def remove(self) -> None:
        try:
            remove_all(self._store)
        except UserError as error:
            warn("backups of a complete training are left: %s", error)
        shutil.rmtree(self._copies.folder, ignore_errors=True)
