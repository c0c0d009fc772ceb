"""Stores by the protocol of their URL: object stores by obstore, others by fsspec."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from spartito.errors import UnwritableError, UserError
from spartito.storage.files import is_for_good
from spartito.storage.limited import limited
from spartito.storage.object_client import advice, by_obstore, connect_objects, no_package, reason
from spartito.storage.remote import Store, UnreadableError

T = TypeVar("T")
Moved = Callable[[], None]
"""Is called whenever something has moved."""

PAUSES = (0.5, 2.0)
"""Seconds before a store that could not be read is asked again."""
RETRIES = 3
"""How often obstore writes again where a store fails for a moment."""
CHUNK = 8 << 20
"""Bytes that move at once, at least those that a store wants of a part."""
SILENCE = 150.0
"""Seconds: half of the usual time limit of a job, so that other tasks still wait for this one."""


def open_store(url: str, silence: float = SILENCE) -> Store:
    """The store at a URL.

    Args:
        url: As ``s3://bucket/run``, or of any protocol that fsspec knows, ``file://`` too.
        silence: Seconds in which nothing moves after which a call ends with an error that names
            the store, see `limited`.

    Returns:
        It; nothing is read yet.

    Raises:
        UserError: The protocol is unknown, its package is not installed, or it cannot be reached.
    """
    return (ObjectStore if by_obstore(url) else FsspecStore)(url, silence)


class ObjectStore(Store):
    """Files in an object store, by obstore: see `open_store`."""

    def __init__(self, url: str, silence: float = SILENCE) -> None:
        self.url, self._silence = url.rstrip("/"), silence
        self._client, self._store = connect_objects(url, RETRIES)

    def sizes(self) -> dict[str, int]:
        def find(moved: Moved) -> dict[str, int]:
            found: dict[str, int] = {}
            for part in self._client.list(self._store, chunk_size=1000):
                moved()
                found |= {str(meta["path"]): int(meta["size"]) for meta in part}
            return found

        return _read(self.url, "listed", self._silence, find)

    def read(self, name: str) -> bytes:
        def read(_: Moved) -> bytes:
            return bytes(self._client.get(self._store, name).bytes())

        return _read(self.url, "read", self._silence, read)

    def get(self, name: str, file: Path) -> None:
        def get(moved: Moved) -> None:
            with open(file, "wb") as opened:
                for data in self._client.get(self._store, name).stream(CHUNK):
                    opened.write(data)
                    moved()

        _read(self.url, "read", self._silence, get)

    def put(self, file: Path, name: str) -> None:
        size = file.stat().st_size

        def put(moved: Moved) -> None:
            data = file.read_bytes() if size <= CHUNK else _chunks(file, moved)
            self._client.put(self._store, name, data, chunk_size=CHUNK)

        _write(self.url, self._silence, put, size)

    def remove(self, name: str) -> None:
        _write(self.url, self._silence, lambda _: self._client.delete(self._store, name))


class FsspecStore(Store):
    """Files under a URL of any protocol that fsspec knows: see `open_store`.

    Options and keys are those of fsspec's configuration.
    """

    def __init__(self, url: str, silence: float = SILENCE) -> None:
        self.url, self._silence = url.rstrip("/"), silence
        try:
            core: Any = importlib.import_module("fsspec.core")
            self._callback: Any = importlib.import_module("fsspec.callbacks").Callback
            self._files, self._root = limited(lambda _: core.url_to_fs(self.url), self._silence)
        except (ImportError, ValueError) as error:
            raise no_package(url, error) from error
        except Exception as error:  # some protocols connect here
            raise _refused(self.url, "reached", UnreadableError, error) from error

    def sizes(self) -> dict[str, int]:
        def find(_: Moved) -> dict[str, int]:
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
            return {path[len(self._root) + 1 :]: int(f["size"]) for path, f in found.items()}

        return _read(self.url, "listed", self._silence, find)

    def read(self, name: str) -> bytes:
        def read(_: Moved) -> bytes:
            return bytes(self._files.cat_file(self._path(name)))

        return _read(self.url, "read", self._silence, read)

    def get(self, name: str, file: Path) -> None:
        path = self._path(name)

        def get(moved: Moved) -> None:
            self._files.get_file(path, str(file), callback=self._told_by(moved))

        _read(self.url, "read", self._silence, get, lambda: int(self._files.size(path) or 0))

    def put(self, file: Path, name: str) -> None:
        path = self._path(name)

        def put(moved: Moved) -> None:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(file), path, callback=self._told_by(moved))

        _write(self.url, self._silence, put, file.stat().st_size)

    def remove(self, name: str) -> None:
        _write(self.url, self._silence, lambda _: self._files.rm_file(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _told_by(self, moved: Moved) -> Any:
        """What fsspec tells of its progress."""
        return self._callback(hooks={"moved": lambda *_, **__: moved()})


def _read(
    url: str,
    done: str,
    silence: float,
    work: Callable[[Moved], T],
    size: Callable[[], int] = int,
) -> T:
    """Read, again where that fails for a moment."""
    for pause in (*PAUSES, None):
        try:
            expected = limited(lambda _: size(), silence)
            return limited(work, silence, expected)
        except Exception as error:
            if is_for_good(error) or pause is None:
                raise _refused(url, done, UnreadableError, error) from error
            time.sleep(pause)
    raise AssertionError


def _write(url: str, silence: float, work: Callable[[Moved], object], size: int = 0) -> None:
    try:
        limited(work, silence, size)
    except Exception as error:
        raise _refused(url, "written", UnwritableError, error) from error


def _refused(url: str, done: str, kind: type[UserError], error: Exception) -> UserError:
    """Name the store in whatever its package raises."""
    return kind(f"{url} cannot be {done}: {reason(error)}", advice(error))


def _chunks(file: Path, moved: Moved) -> Iterator[bytes]:
    with open(file, "rb") as opened:
        while data := opened.read(CHUNK):
            yield data
            moved()
