"""Backups in a store that is no file system of this machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spartito.errors import UnwritableError, UserError
from spartito.log import warn
from spartito.storage.private import private_directory
from spartito.storage.remote import (
    Store,
    UnreadableError,
    download,
    new_name,
    remove_all,
    remove_older,
    upload,
    whole_ones,
)
from spartito.system.files import temporary_folder
from spartito.training.backups.folder import KEPT, Backups

_ADVICE = "Name another folder for temporary files by TMPDIR."


class RemoteBackups(Backups):
    """Those in a store where nothing can be renamed.

    Tasks write a backup into a folder of the chief's machine, from which the chief uploads it. A
    task that reads one downloads it to its machine first, once for all tasks there.

    Args:
        store: Where they lie, and nothing else.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._upload = store, ""
        identity = hashlib.sha256(store.url.encode()).hexdigest()[:16]
        self._folder = temporary_folder() / f"spartito-{os.getuid()}"
        self._folder /= f"backup-{identity}"
        self.directory = self._folder / "written"
        self._lock = -1

    def newest(self) -> str:
        self._prepare()
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
        self._prepare()
        path = self.path_of(name)
        if self._lock < 0:
            self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # others who read it hold this one too
        if not path.exists():
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                if not path.exists():
                    self._download(name, path)
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_SH)
        return path

    def path_of(self, name: str) -> Path:
        return self._folder / "read" / name

    def release(self) -> None:
        """Remove what was downloaded, unless another task of this machine still reads it."""
        if self._lock < 0:
            return
        with suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._folder / "read", ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def where(self, name: str) -> str:
        return f"{self._store.url}/{name}".rstrip("/")

    def begin(self, name: str) -> dict[str, Any]:
        self._upload = new_name(name)
        with _saving():
            self._prepare()
            found = whole_ones(self._store)
        newest = int(found[-1][1].about.get("sequence", 0)) if found else 0
        return {"sequence": newest + 1}

    def end(self, name: str) -> None:
        path = self.directory / name
        with _saving():
            try:
                upload(self._store, path, self._upload)
            finally:
                shutil.rmtree(path, ignore_errors=True)
            whole = [name for name, _ in whole_ones(self._store)]
            if self._upload not in whole:
                raise UserError(f"{self.where(self._upload)} was uploaded, and is not whole there")
        try:
            remove_older(self._store, {self._upload, *whole[-KEPT:]}, KEPT)
        except UserError as error:  # the next turn tries it again
            warn("older backups are left: %s", error)

    def remove(self) -> None:
        try:
            remove_all(self._store)
        except UserError as error:
            warn("backups of a complete training are left: %s", error)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _prepare(self) -> None:
        """Make the folder, for this user alone."""
        private_directory(self._folder.parent, _ADVICE)
        private_directory(self._folder, _ADVICE)

    def _download(self, name: str, path: Path) -> None:
        part = path.with_name("part")
        shutil.rmtree(path.parent, ignore_errors=True)  # what killed tasks left, and older ones
        try:
            download(self._store, name, part)
        except UnreadableError:
            raise
        except UserError:  # perhaps on its way, and not there
            shutil.rmtree(part, ignore_errors=True)
            download(self._store, name, part)
        part.rename(path)


@contextmanager
def _saving() -> Iterator[None]:
    """Whatever a store refuses pauses saving, and not training."""
    try:
        yield
    except UserError as error:
        raise UnwritableError(*str(error).split("\n  ", 1)) from error
