"""Directories in a store where nothing can be renamed: files first, manifest last.

    store/
        step-00000400.5f1c9a20d3b47e68/     a name that is never used again
            spartito-upload.json            the manifest to be, written first, removed last
            model.safetensors
            state.json
            manifest.json                   written last, removed first: without it none counts

Whatever operation was the last one, a directory is whole if its manifest is there, and its files
are as large as that says. Only files that one of the two names are ever removed. That something
cannot be read at the moment says nothing of it: it is an error, and no reason to remove anything.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from spartito.errors import UserError
from spartito.storage.atomic import (
    MANIFEST,
    Manifest,
    NewerFormatError,
    manifest_in,
    read_manifest,
    verify,
)

PLAN = "spartito-upload.json"
"""The file that says what an upload is going to write: the manifest, before the files."""

_NAME = re.compile(r"[\w.-]+\.[0-9a-f]{8}([0-9a-f]{8})?")


class UnreadableError(UserError):
    """A store could not be read, for now or for good: nobody knows what is there."""


class AbsentError(UnreadableError):
    """A file or bucket is not there."""


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


def new_name(name: str) -> str:
    """A name for a directory in a store that was never used."""
    return f"{name}.{secrets.token_hex(8)}"


def upload(store: Store, directory: Path, name: str) -> None:
    """Copy a directory with a manifest to a store.

    Args:
        store: Where to.
        directory: What `spartito.storage.atomic.write_directory` has written.
        name: Its name there, of `new_name`.

    Raises:
        UnwritableError: If the store refuses.
    """
    store.put(directory / MANIFEST, f"{name}/{PLAN}")
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
        UnreadableError: If a manifest that is there cannot be read.
        NewerFormatError: If a later version has written there.
    """
    sizes, found = store.sizes(), list[tuple[str, Manifest]]()
    for name in _ours(sizes):
        if f"{name}/{MANIFEST}" not in sizes:
            continue
        manifest = _manifest_of(store, f"{name}/{MANIFEST}")
        if manifest is not None and all(
            sizes.get(f"{name}/{n}") == fact.size for n, fact in manifest.files.items()
        ):
            found.append((name, manifest))
    return sorted(found, key=lambda each: (int(each[1].about.get("sequence", -1)), each[0]))


def remove_older(store: Store, stay: Collection[str], keep: int) -> None:
    """Remove other directories of a store, and what uploads that were cut off have left.

    Nothing is removed where fewer than ``keep`` stay.

    Args:
        store: Whose.
        stay: The names of those that stay, which are whole.
        keep: How many there must be.

    Raises:
        UserError: If the store refuses.
    """
    if len(stay) >= keep:
        _remove(store, stay)


def remove_all(store: Store) -> None:
    """Remove all directories that were uploaded to a store, and nothing else.

    Raises:
        UserError: If the store refuses.
    """
    _remove(store, ())


def _remove(store: Store, stay: Collection[str]) -> None:
    sizes = store.sizes()
    for name in sorted(_ours(sizes).difference(stay)):
        for file in _removable(store, name, sizes):
            store.remove(file)


def _removable(store: Store, name: str, sizes: Mapping[str, int]) -> list[str]:
    """What we wrote of a directory, in the order in which it goes."""
    first, last = f"{name}/{MANIFEST}", f"{name}/{PLAN}"
    named: set[str] = set()
    for file in (first, last):
        found = _manifest_of(store, file) if file in sizes else None
        named |= {f"{name}/{n}" for n in found.files} if found is not None else set()
    if not named and last not in sizes:
        return []  # nobody knows whose it is
    return [file for file in (first, *sorted(named), last) if file in sizes]


def _manifest_of(store: Store, file: str) -> Manifest | None:
    """The manifest in a file that is there; None where it was cut off."""
    content = store.read(file)
    try:
        return manifest_in(content, f"{store.url}/{file.partition('/')[0]}")
    except NewerFormatError:
        raise
    except UserError:
        return None


def _ours(sizes: Mapping[str, int]) -> set[str]:
    """The directories with a name of `new_name`."""
    return {name for file in sizes if _NAME.fullmatch(name := file.partition("/")[0])}
