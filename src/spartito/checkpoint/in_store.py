"""Checkpoints in a store where nothing can be renamed: written and read by way of this machine.

Tasks write a checkpoint into a folder of the chief's machine, from which the chief uploads it. A
task that reads one downloads it to its machine first, once for all tasks there.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spartito.checkpoint.manager import Score, about_of
from spartito.errors import UnwritableError, UserError
from spartito.notes import warn
from spartito.storage.atomic import MANIFEST, read_manifest
from spartito.storage.private import private_directory
from spartito.storage.remote import (
    Store,
    UnreadableError,
    download,
    new_name,
    remove_older,
    upload,
    whole_ones,
)
from spartito.storage.stores import open_store
from spartito.system.files import temporary_folder
from spartito.urls import is_remote, local_path

_ADVICE = "Name another folder for temporary files by TMPDIR."


class LocalCopies:
    """The folder of this machine through which the directories of a store go.

    Args:
        store: Where they lie.
        name: The only one that goes through it, so that others of the store have folders of their
            own; "" where all do.
    """

    def __init__(self, store: Store, name: str = "") -> None:
        self._store, self._lock = store, -1
        where = f"{store.url}/{name}" if name else store.url
        identity = hashlib.sha256(where.encode()).hexdigest()[:16]
        self.folder = temporary_folder() / f"spartito-{os.getuid()}" / f"backup-{identity}"
        self.written = self.folder / "written"
        """Where what is uploaded is written first."""

    def prepare(self) -> None:
        """Make the folder, for this user alone."""
        private_directory(self.folder.parent, _ADVICE)
        private_directory(self.folder, _ADVICE)

    def next_number(self) -> int:
        """The number of the directory that is written next; the folder is there then.

        Raises:
            UnwritableError: The store cannot be read, or the folder not made.
        """
        with saving():
            self.prepare()
            found = whole_ones(self._store)
        return 1 + (int(found[-1][1].about.get("sequence", 0)) if found else 0)

    def fetch(self, name: str) -> Path:
        """Where this task reads a directory of the store.

        Args:
            name: Its name there.

        Raises:
            UserError: It cannot be read, or is not what its manifest says.
        """
        self.prepare()
        path = self.path_of(name)
        if self._lock < 0:
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
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
        """Where that is, whether it is there or not."""
        return self.folder / "read" / name

    def release(self) -> None:
        """Remove what was downloaded, unless another task of this machine still reads it."""
        if self._lock < 0:
            return
        with suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.folder / "read", ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

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


class StoredCheckpoints:
    """The checkpoints of `ModelCheckpoint` in a store, each under a name that is never used again.

    Args:
        url: Of the store.
        keep: How many of the newest stay, all when None; the best stays besides.
    """

    def __init__(self, url: str, keep: int | None = None) -> None:
        self.url, self._keep, self._upload = url.rstrip("/"), keep, ""
        self._store = open_store(self.url)
        self._copies = LocalCopies(self._store)

    @property
    def directory(self) -> Path:
        """Where they are written first, on the chief's machine."""
        return self._copies.written

    def prepare(self) -> None:
        """Reach the store, and clear what killed writers left on this machine."""
        self._copies.prepare()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._store.sizes()

    def mine(self) -> list[str]:
        """The names of those that are there, oldest first."""
        return [name for name, _ in whole_ones(self._store)]

    def begin(
        self, name: str, metrics: Mapping[str, float] | None = None, best: Score | None = None
    ) -> dict[str, Any]:
        """As `CheckpointManager.begin`."""
        self._upload = new_name(name)
        return about_of(self._copies.next_number(), metrics, best)

    def end(self, name: str, best: Score | None = None) -> None:
        """As `CheckpointManager.end`: the chief uploads it, and the oldest go."""
        put(self._store, self.directory / name, self._upload)
        if self._keep is None:
            return
        found = whole_ones(self._store)
        whole = [name for name, _ in found]
        marked = [name for name, manifest in found if manifest.about.get("best") is not None]
        try:
            remove_older(self._store, {*whole[-self._keep :], *marked[-1:]}, self._keep)
        except UserError as error:  # the next turn tries it again
            warn("older checkpoints are left: %s", error)


class StoredCheckpoint:
    """One checkpoint in a store, under the name that a user gave it.

    Args:
        url: Its URL.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        folder, _, self._name = self._url.rpartition("/")
        self._store = open_store(folder)
        self._copies = LocalCopies(self._store, self._name)

    @property
    def path(self) -> Path:
        """Where it is written first, on the chief's machine."""
        return self._copies.written / self._name

    def begin(self, about: Callable[[], Mapping[str, Any]] | None) -> Mapping[str, Any]:
        """Before it is written.

        Args:
            about: Says what its manifest is to say.

        Returns:
            That.

        Raises:
            UserError: Something is there: in a store nothing can be replaced as a whole.
        """
        self._copies.prepare()
        if any(name.startswith(f"{self._name}/") for name in self._store.sizes()):
            raise UserError(f"{self._url} is there already", "Give each checkpoint a new name.")
        return {} if about is None else about()

    def end(self, then: Callable[[], None] | None) -> None:
        """Upload it, and go on with ``then``."""
        put(self._store, self.path, self._name)
        if then is not None:
            then()


def put(store: Store, directory: Path, name: str) -> None:
    """Upload a directory, and remove it here.

    Args:
        store: Where to.
        directory: What `spartito.storage.atomic.write_directory` has written.
        name: Its name there.

    Raises:
        UnwritableError: The store refuses, or it is not whole there.
    """
    with saving():
        files = read_manifest(directory).files.items()
        expected = {f"{name}/{file}": fact.size for file, fact in files}
        try:
            upload(store, directory, name)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        sizes = store.sizes()
        if f"{name}/{MANIFEST}" not in sizes or not expected.items() <= sizes.items():
            raise UserError(f"{store.url}/{name} was uploaded, and is not whole there")


@contextmanager
def saving() -> Iterator[None]:
    """Whatever a store refuses pauses saving, and not training."""
    try:
        yield
    except UserError as error:
        raise UnwritableError(*str(error).split("\n  ", 1)) from error


def fetch_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Where this task reads a checkpoint that may lie in a store; it goes with this process.

    Args:
        path: A path, which stays as it is; or the URL of a checkpoint, or of a folder of those of
            `ModelCheckpoint` or `BackupAndRestore`, whose newest is taken.

    Raises:
        UserError: There is none, or it cannot be read.
    """
    where = os.fspath(path)
    if not is_remote(where) or local_path(where):
        return Path(local_path(where) or where)
    where = where.rstrip("/")
    store = open_store(where)
    if MANIFEST in store.sizes():
        head, _, name = where.rpartition("/")
        store = open_store(head)
    else:
        found = whole_ones(store)
        if not found:
            raise UserError(
                f"{where} has no checkpoint that is whole",
                "Name one, or the folder of those that ModelCheckpoint wrote.",
            )
        name = found[-1][0]
    copies = LocalCopies(store, name)
    atexit.register(copies.release)
    return copies.fetch(name)
