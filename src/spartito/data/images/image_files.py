"""Image files as bytes: in folders of this machine, or in a store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from spartito.data.images.decode import read_bytes
from spartito.data.images.headers import ImageFault, Kind
from spartito.storage.files import File, Files
from spartito.storage.span_cache import SpanCache
from spartito.storage.whole_files import read_cached

THREADS = 32
"""Files that are fetched together: each takes as long as the store thinks about it."""

MOST = 4096
"""Files that are kept for who expected them: some are never asked for."""

Stamp = tuple[int, str]
"""A file's size in bytes, and what changes when its content does."""


class ImageFiles(Protocol):
    """Image files by path. Reading is safe from many threads."""

    def read(self, path: str) -> bytes:
        """The whole content of one, at least one byte.

        Raises:
            ImageFault: It is empty, or this machine cannot read it.
            UnreadableError: A store does not give it.
        """
        ...

    def stamp(self, path: str) -> Stamp | None:
        """Which content it has; None where that cannot be found out."""
        ...

    def expect(self, paths: Sequence[str]) -> None:
        """Hear which ones will be read next, each once."""
        ...


class LocalImages(ImageFiles):
    """Those of this machine: nothing is gained by knowing which ones will be read."""

    def read(self, path: str) -> bytes:
        return read_bytes(path)

    def stamp(self, path: str) -> Stamp | None:
        try:
            found = os.stat(path)
        except OSError:
            return None
        return found.st_size, str(found.st_mtime_ns)

    def expect(self, paths: Sequence[str]) -> None:
        pass


class RemoteImages(ImageFiles):
    """Those of a store; what is expected is fetched together.

    Args:
        files: Where they lie.
        found: All of them; a path is the URL of the store and a name.
        cache: Keeps what was fetched.
    """

    def __init__(self, files: Files, found: Sequence[File], cache: SpanCache) -> None:
        self._files, self._cache = files, cache
        self._found = {f"{files.url}/{file.name}": file for file in found}
        self._coming: dict[str, Future[bytes]] = {}
        self._own: dict[str, ThreadPoolExecutor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Another process has threads of its own."""
        return {**self.__dict__, "_coming": {}, "_own": {}}

    def read(self, path: str) -> bytes:
        coming = self._coming.pop(path, None)
        data = self._fetch(path) if coming is None else coming.result()
        if not data:
            raise ImageFault(Kind.EMPTY, "0 bytes")
        return data

    def stamp(self, path: str) -> Stamp | None:
        file = self._found[path]
        return (file.size, file.version) if file.version else None

    def expect(self, paths: Sequence[str]) -> None:
        if "threads" not in self._own:
            made = ThreadPoolExecutor(THREADS, thread_name_prefix="spartito image")
            self._own.setdefault("threads", made)
        for path in paths:
            self._coming[path] = self._own["threads"].submit(self._fetch, path)
        for path in list(self._coming)[: max(0, len(self._coming) - MOST)]:
            self._coming.pop(path, None)  # of what another task has decoded meanwhile

    def _fetch(self, path: str) -> bytes:
        file = self._found[path]
        return read_cached(self._files, file, 0, file.size, self._cache)
