"""Where shards go: a folder, or a store. A file appears whole there, or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from spartito.errors import UserError
from spartito.folders import LOCK, hold, release
from spartito.storage.atomic import new_file, sweep, write_file_atomically
from spartito.storage.leftovers import is_leftover
from spartito.storage.remote import Store
from spartito.storage.stores import open_store
from spartito.urls import is_remote, local_path


class Destination(Protocol):
    """Files by name in one folder, which one process fills."""

    url: str
    """What a user calls it."""

    def names(self) -> list[str]:
        """What is there, but for leftovers of our own."""
        ...

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, or replace it."""
        ...

    def new(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A new file to fill, which is there when the block ends well.

        Raises:
            UserError: There is another file of that name, or the folder cannot be written.
        """
        ...

    def held(self) -> AbstractContextManager[None]:
        """Keep other processes off, for the time of a block.

        Raises:
            UserError: Another one has it.
        """
        ...


class FolderDestination:
    """A folder of this machine.

    Args:
        url: Its path; it is made.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._path = Path(url)

    def names(self) -> list[str]:
        """As `Destination.names`."""
        if not self._path.is_dir():
            return []
        found = (path for path in self._path.iterdir() if not is_leftover(path))
        return sorted(path.name for path in found if path.name != LOCK)

    def read(self, name: str) -> bytes:
        """As `Destination.read`."""
        return (self._path / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """As `Destination.write`."""
        write_file_atomically(self._path / name, content)

    @contextmanager
    def new(self, name: str) -> Iterator[BinaryIO]:
        """As `Destination.new`; one that is there with the same content is left as it is."""
        path = self._path / name
        with new_file(path) as file:
            yield file
            file.flush()
            if os.path.lexists(path) and not _are_same(Path(file.name), path):
                raise UserError(
                    f"{path} has another content than what is packed now",
                    "It is not replaced: move it somewhere else, or pack into a new folder.",
                )

    @contextmanager
    def held(self) -> Iterator[None]:
        """As `Destination.held`; clears what a killed process left half written."""
        hold(self._path, "packed data", self)
        try:
            sweep(self._path)
            yield
        finally:
            release(self)


class StoreDestination:
    """A folder of a store, where a file is written here first and put there whole.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self.url, self._store = store.url, store

    def names(self) -> list[str]:
        """As `Destination.names`."""
        return sorted(self._store.sizes())

    def read(self, name: str) -> bytes:
        """As `Destination.read`."""
        return self._store.read(name)

    def write(self, name: str, content: bytes) -> None:
        """As `Destination.write`."""
        with self.new(name) as file:
            file.write(content)

    @contextmanager
    def new(self, name: str) -> Iterator[BinaryIO]:
        """As `Destination.new`; the folder was empty when packing began, so its shards are ours."""
        with tempfile.NamedTemporaryFile(prefix="spartito-pack-") as file:
            yield file  # type: ignore[misc]
            file.flush()
            self._store.put(Path(file.name), name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """As `Destination.held`: two that pack the same write the same, others are refused."""
        yield


def open_destination(url: str) -> Destination:
    """Where shards go.

    Args:
        url: A path, or ``protocol://...``.

    Raises:
        UserError: It cannot be written, as a web server, or a package is not installed.
    """
    if not is_remote(url) or local_path(url):
        return FolderDestination(os.path.abspath(os.path.expanduser(local_path(url))))
    if url.startswith(("http://", "https://")):
        raise UserError(f"{url} cannot be written: it is a web server", "Name a folder or store.")
    return StoreDestination(open_store(url))


def _are_same(one: Path, other: Path) -> bool:
    if other.is_symlink() or not other.is_file() or one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as first, other.open("rb") as second:
        hashes = (hashlib.file_digest(file, "sha256").digest() for file in (first, second))
        return next(hashes) == next(hashes)


class Hashing(io.RawIOBase):
    """A file that is written front to back, and hashed.

    Args:
        file: Where the bytes go.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._found, self.size = file, hashlib.sha256(), 0

    def writable(self) -> bool:
        """As of any file."""
        return True

    def tell(self) -> int:
        """As of any file."""
        return self.size

    def write(self, data: Any) -> int:
        """As of any file."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._found.update(view)
        self.size += len(view)
        return len(view)

    @property
    def sha256(self) -> str:
        """Of all that was written, in hex."""
        return self._found.hexdigest()
