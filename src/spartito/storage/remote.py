"""Directories in a store where nothing can be renamed: files first, manifest last.

    store/
        step-00000400.5f1c9a20/     a name that is never used again
            model.safetensors
            state.json
            manifest.json           written last, removed first: what lacks it does not count

Whatever operation was the last one, a directory is whole if its manifest is there, and its files
are as large as that says.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from spartito.errors import UnwritableError, UserError
from spartito.storage.atomic import (
    MANIFEST,
    Manifest,
    NewerFormatError,
    manifest_in,
    read_manifest,
    verify,
)


class Store(Protocol):
    """Files by name, each written and removed whole, one after the other."""

    url: str
    """What a user calls it."""

    def sizes(self) -> dict[str, int]:
        """The bytes of each file, by name: all there are."""
        ...

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        ...

    def get(self, name: str, file: Path) -> None:
        """Copy one to a local file."""
        ...

    def put(self, file: Path, name: str) -> None:
        """Copy a local file there."""
        ...

    def remove(self, name: str) -> None:
        """Remove one."""
        ...


def is_remote(path: str) -> bool:
    """Whether a path is that of a store: ``s3://bucket/run``."""
    return "://" in path


class FsspecStore(Store):
    """Files under a URL of any protocol that fsspec knows.

    Args:
        url: As ``s3://bucket/run``; options and keys are those of fsspec's configuration.

    Raises:
        UserError: The protocol is unknown, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            core: Any = importlib.import_module("fsspec.core")
            self._files, self._root = core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"{url} cannot be reached: {error}",
                "pip install 'spartito[remote]' and the package of this protocol, as s3fs or "
                "gcsfs, or name a folder.",
            ) from error

    def sizes(self) -> dict[str, int]:
        with self._told("listed"):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
            return {path[len(self._root) + 1 :]: int(f["size"]) for path, f in found.items()}

    def read(self, name: str) -> bytes:
        with self._told("read"):
            return bytes(self._files.cat_file(self._path(name)))

    def get(self, name: str, file: Path) -> None:
        with self._told("read"):
            self._files.get_file(self._path(name), str(file))

    def put(self, file: Path, name: str) -> None:
        with self._told("written", UnwritableError):
            path = self._path(name)
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(file), path)

    def remove(self, name: str) -> None:
        with self._told("written", UnwritableError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _told(self, done: str, kind: type[UserError] = UserError) -> Iterator[None]:
        """Name the store in whatever its package raises."""
        try:
            yield
        except Exception as error:
            why = str(error) or type(error).__name__
            raise kind(f"{self.url} cannot be {done}: {why}", "Is it there, and yours?") from error


def upload(store: Store, directory: Path, name: str) -> None:
    """Copy a directory with a manifest to a store.

    Args:
        store: Where to.
        directory: What `spartito.storage.atomic.write_directory` has written.
        name: Its name there, one that was never used.

    Raises:
        UnwritableError: If the store refuses.
    """
    for file in sorted(read_manifest(directory).files):
        store.put(directory / file, f"{name}/{file}")
    store.put(directory / MANIFEST, f"{name}/{MANIFEST}")


def download(store: Store, name: str, directory: Path) -> None:
    """Copy a directory of a store to a new local one, and compare it with its checksums.

    Args:
        store: Where from.
        name: Its name there.
        directory: Where to; it is made.

    Raises:
        UserError: If a file cannot be read, or is not what the manifest says.
    """
    content = store.read(f"{name}/{MANIFEST}")
    for file in manifest_in(content, f"{store.url}/{name}").files:
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        store.get(f"{name}/{file}", directory / file)
    (directory / MANIFEST).write_bytes(content)
    verify(directory)


def whole_ones(store: Store) -> list[tuple[str, Manifest]]:
    """The directories of a store that are whole, as far as sizes tell, oldest first.

    Raises:
        UserError: If the store cannot be read, or a later version has written there.
    """
    sizes, found = store.sizes(), list[tuple[str, Manifest]]()
    for name in {file.partition("/")[0] for file in sizes if file.endswith(f"/{MANIFEST}")}:
        try:
            manifest = manifest_in(store.read(f"{name}/{MANIFEST}"), f"{store.url}/{name}")
        except NewerFormatError:
            raise
        except UserError:  # cut off
            continue
        if all(sizes.get(f"{name}/{n}") == fact.size for n, fact in manifest.files.items()):
            found.append((name, manifest))
    return sorted(found, key=lambda each: (int(each[1].about.get("sequence", -1)), each[0]))


def keep_only(store: Store, names: Collection[str]) -> None:
    """Remove all other directories of a store, and what uploads that were cut off have left.

    Args:
        store: Whose.
        names: What stays.

    Raises:
        UnwritableError: If the store refuses.
    """
    others = [file for file in store.sizes() if file.partition("/")[0] not in names]
    for file in sorted(others, key=lambda file: (not file.endswith(f"/{MANIFEST}"), file)):
        store.remove(file)
