"""Directories and files that appear whole or not at all, whenever the process dies.

A directory is written beside its path under a hidden name, its files are fsynced, a manifest
with their checksums is written last, and one rename puts it there. The writer holds an `flock` on
the hidden directory, which ends with its process: so a leftover is told from work in progress.

Nothing is removed but by a name that `spartito.storage.leftovers` gave, or because a manifest
names it: files that a user has put beside them or among them stay.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from spartito.errors import UnwritableError, UserError, writable
from spartito.failpoints import failpoint
from spartito.folders import is_at
from spartito.storage.leftovers import NEW, OLD, beside, is_leftover, parts_of

TAKE_ANOTHER = "Take another checkpoint; this one was damaged after it was written."
MANIFEST = "manifest.json"
WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
FORMAT = 1
"""The format of the directories that this version writes; it reads this one and older ones."""


class NewerFormatError(UserError):
    """A directory that a later version has written."""


@dataclass(frozen=True)
class FileFact:
    """What the manifest knows of one file: its size in bytes and its SHA-256, in hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a directory by their relative names, and what the writer said ``about`` them."""

    files: Mapping[str, FileFact]
    about: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def write_directory(
    path: str | os.PathLike[str], about: Mapping[str, Any] | None = None
) -> Iterator[Path]:
    """Give an empty directory to fill; it takes the name ``path`` when the block ends well.

    An older directory of that name is replaced if all in it is known to its manifest: until the
    last moment it stays, and a process killed between the two renames leaves it to `sweep`, which
    puts it back. After an error nothing is left. ``about`` is JSON that goes into the manifest.
    Raises `UserError` when the folder cannot be written, which is what an `OSError` of the block
    means too.
    """
    path = Path(path)
    if not path.name:
        raise UserError(f"{str(path)!r} names no new directory", "Name one: it is made.")
    with writable(path.parent):
        _check_replaceable(path)
        with _new(path, Path.mkdir) as new:
            try:
                yield new
                failpoint("storage.directory.before_manifest")
                _write_manifest(new, about or {})
                failpoint("storage.directory.before_rename")
                _put_in_place(new, path)
            except BaseException:
                shutil.rmtree(new, ignore_errors=True)
                raise


@contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Give a file to fill; it takes the name ``path`` when the block ends well.

    Until then it lies beside it under a hidden name; after an error nothing is left. Raises
    `UserError` when the folder cannot be written, which is what an `OSError` of the block means
    too, and `UnwritableError` where there is a file that nobody may write.
    """
    path = Path(path)
    check_not_protected(path)
    with writable(path.parent), _new(path, partial(Path.touch, exist_ok=False)) as new:
        try:
            with new.open("wb") as file:
                yield file
            replace_durably(new, path)  # held until it has its name: no sweep takes it
        except BaseException:
            new.unlink(missing_ok=True)
            raise


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Give an empty folder beside ``path`` for what is to have its name; it is gone at the end.

    What killed processes left there for the same ``path`` goes first. Raises `UserError` when the
    folder cannot be written.
    """
    with ExitStack() as stack:
        with writable(path.parent):
            sweep(path.parent, path)
            new = stack.enter_context(_new(path, Path.mkdir))
        stack.callback(shutil.rmtree, new, ignore_errors=True)
        yield new


def write_file_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write one file so that a reader sees the old or the new content, never a part of it.

    Raises `UserError` when the folder cannot be written.
    """
    with new_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def replace_durably(new: Path, path: Path) -> None:
    """Give the file ``new``, on the same disk, the name ``path``, so that it survives a crash.

    Its content is on the disk before it has the name, and the name is when this returns.
    """
    _sync(new)
    failpoint("storage.file.before_rename")
    new.replace(path)
    _sync_directory(path.parent)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of the directory ``path``.

    Raises `UserError` when there is none or it is broken, and `NewerFormatError`, which is one
    too, when only a later version of Spartito can read the directory.
    """
    file = Path(path) / MANIFEST
    try:
        return manifest_in(file.read_bytes(), path)
    except FileNotFoundError:
        raise UserError(
            f"{path} has no {MANIFEST}: nothing was saved there, or it is not complete",
            "Name a checkpoint directory that was written to its end.",
        ) from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error


def manifest_in(content: bytes, path: str | os.PathLike[str]) -> Manifest:
    """The manifest that a file of the directory ``path`` holds; raises as `read_manifest`."""
    try:
        raw = json.loads(content)
        if raw["format"] > FORMAT:
            raise NewerFormatError(
                f"{path} has format {raw['format']}, and this version of Spartito reads up to "
                f"{FORMAT}",
                "Read it with the version that wrote it, or a later one.",
            )
        files = {_relative(n): FileFact(f["size"], f["sha256"]) for n, f in raw["files"].items()}
        return Manifest(files, dict(raw["about"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}/{MANIFEST} is not a manifest: {error}", TAKE_ANOTHER) from error


def verify(path: str | os.PathLike[str], only: Collection[str] | None = None) -> Manifest:
    """Read every file of ``path`` and compare it with the manifest, which is returned.

    ``only`` are the names of some files, where the others do not matter.

    Raises `UserError` that names the first file that is missing, too short, or changed.
    """
    manifest = read_manifest(path)
    for name, fact in manifest.files.items():
        if only is not None and name not in only:
            continue
        file = Path(path) / name
        try:
            found = _fact(file)
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}", TAKE_ANOTHER) from error
        if found.size != fact.size:
            raise UserError(
                f"{file} has {found.size} bytes, its manifest says {fact.size}", TAKE_ANOTHER
            )
        if found.sha256 != fact.sha256:
            raise UserError(
                f"{file} has changed: its SHA-256 is not the one in {MANIFEST}", TAKE_ANOTHER
            )
    return manifest


def is_whole(path: str | os.PathLike[str]) -> bool:
    """Whether all files of the directory ``path`` are there, by their sizes; none is read.

    A store that is mounted as a folder shows them one by one, whatever was renamed on the machine
    that wrote them.
    """
    try:
        files = read_manifest(path).files
        return all((Path(path) / name).stat().st_size == fact.size for name, fact in files.items())
    except (OSError, UserError):
        return False


def sweep(directory: str | os.PathLike[str], only: Path | None = None) -> list[Path]:
    """Clear what killed writers left in ``directory``; returns the leftovers that it treated.

    With ``only`` it is what was to be that path.

    An older directory that was moved aside and never replaced gets its name back. What a
    living process is writing is left alone, and so is what this process may not remove, and all
    that has another name than `spartito.storage.leftovers` gives.
    """
    try:
        found = sorted(Path(directory).iterdir())
    except OSError:
        return []
    names = [p for p in found if is_leftover(p) and only in (None, _new_of(p))]
    return [p for p in names if not p.is_symlink() and _clear(p)]


def _clear(leftover: Path) -> bool:
    """Treat one that nobody holds, which is ours meanwhile; False where somebody does."""
    try:
        descriptor = os.open(leftover, os.O_RDONLY)
    except OSError:
        return False
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a writer's or another sweep's; or nothing can be locked here
            return False
        kind, target = parts_of(leftover)
        with suppress(OSError):
            if kind == OLD:
                if os.path.lexists(target):
                    remove_directory(leftover)
                else:
                    leftover.rename(target)
            elif leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
    finally:
        os.close(descriptor)
    return True


def _new_of(leftover: Path) -> Path | None:
    """The path that a leftover was to be; None for what was moved aside."""
    kind, target = parts_of(leftover)
    return target if kind == NEW else None


def foreign(path: str | os.PathLike[str]) -> list[str]:
    """What the directory ``path`` holds beside its manifest and the files that this names.

    Returns:
        Relative names, sorted. Empty folders do not count.

    Raises:
        UserError: If there is no manifest, or it cannot be read.
    """
    known = {MANIFEST, *read_manifest(path).files}
    return sorted(name for name in _all_files(Path(path)) if name not in known)


def remove_directory(path: str | os.PathLike[str]) -> bool:
    """Remove what `write_directory` has written: the files that the manifest names, and it.

    Whatever else is in there stays, and the folder with it. The manifest goes last: as long as it
    is there the next call knows the rest.

    Returns:
        Whether nothing is left; False too where there is no manifest to go by, unless the folder
        is empty.
    """
    path = Path(path)
    with suppress(OSError, UserError):
        if path.is_symlink():  # what it points to is somewhere else, and has its own name there
            return False
        if (path / MANIFEST).exists():
            files = read_manifest(path).files
            for name in files:
                (path / name).unlink(missing_ok=True)
            (path / MANIFEST).unlink()
        for folder, _, _ in os.walk(path, topdown=False):
            with suppress(OSError):  # what is not empty
                os.rmdir(folder)
    return not path.exists()


def check_writable(directory: str | os.PathLike[str]) -> None:
    """Make ``directory``, and try to write there; an `UnwritableError` if that cannot be done."""
    directory = Path(directory)
    with writable(directory):
        directory.mkdir(parents=True, exist_ok=True)
        probe = beside(directory / "probe", NEW)
        try:
            with probe.open("xb"):
                pass
        finally:
            probe.unlink(missing_ok=True)


def check_not_protected(path: Path) -> None:
    """Refuse to replace a file that its owner has made read-only, as those who write into it do."""
    with suppress(OSError):  # writing says it
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) and not (mode & WRITES and os.access(path, os.W_OK)):
            raise UnwritableError(
                f"{path} is read-only, and would be replaced",
                f"Name another file, or make it writable: chmod u+w {path}.",
            )


def _check_replaceable(path: Path) -> None:
    """Refuse to replace a directory with anything in it that we did not write: it would be lost."""
    if path.is_symlink():
        raise UserError(
            f"{path} is a link to {os.readlink(path)}, which would be replaced",
            "Name the directory itself, or a new one.",
        )
    if path.is_file():
        raise UnwritableError(
            f"{path} cannot be written: it is a file, and not a folder", "Name a new folder."
        )
    if not path.is_dir() or not any(path.iterdir()):
        return
    try:
        others = foreign(path)
    except UserError:
        raise UserError(
            f"{path} is a folder with other files in it, which would be replaced",
            "Name a new directory, as one inside of it.",
        ) from None
    if others:
        raise UnwritableError(
            f"{path} cannot be replaced: {others[0]} in it is not of the checkpoint",
            "Move it somewhere else, or name another directory.",
        )


def _all_files(path: Path) -> Iterator[str]:
    """All that is no folder under ``path``, by relative names; links are not followed."""
    for folder, folders, files in os.walk(path):
        inside = Path(folder)
        links = [name for name in folders if (inside / name).is_symlink()]
        for name in [*files, *links]:
            yield (inside / name).relative_to(path).as_posix()


def _relative(name: str) -> str:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name!r} is outside of the directory")
    return name


def _fact(file: Path) -> FileFact:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileFact(stream.tell(), digest)


def _write_manifest(directory: Path, about: Mapping[str, Any]) -> None:
    """Make all that lies in ``directory`` durable, then say what it is."""
    inside = sorted(directory.rglob("*"))
    files = {p.relative_to(directory).as_posix(): p for p in inside if p.is_file()}
    for file in files.values():
        _sync(file)
    facts = {name: _fact(file) for name, file in files.items()}
    manifest = {
        "format": FORMAT,
        "about": dict(about),
        "files": {n: {"size": f.size, "sha256": f.sha256} for n, f in facts.items()},
    }
    for folder in (p for p in inside if p.is_dir()):
        _sync_directory(folder)
    write_file_atomically(directory / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _put_in_place(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``; a directory in the way is moved aside first, removed last."""
    if not path.is_dir():
        new.rename(path)
        _sync_directory(path.parent)
        return
    with _held_aside(path):
        old = path.rename(beside(path, OLD))
        try:
            failpoint("storage.directory.between_renames")
            new.rename(path)
        except BaseException:
            old.rename(path)
            raise
        _sync_directory(path.parent)
    remove_directory(old)


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    # Some network file systems refuse to sync a directory; their rename is durable by itself.
    with suppress(OSError):
        _sync(directory)


@contextmanager
def _new(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """What ``make`` has made under a hidden name beside ``path``, held until the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        new = beside(path, NEW)
        make(new)
        if (descriptor := _hold(new)) is not None:
            break
    try:
        yield new
    finally:
        os.close(descriptor)


def _hold(new: Path) -> int | None:
    """A descriptor that keeps every `sweep` from ``new``; None where one came upon it before."""
    try:
        descriptor = os.open(new, os.O_RDONLY)
    except FileNotFoundError:
        return None
    held = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held = False
    except OSError:  # where nothing can be locked a sweep cannot either, and keeps away
        pass
    if held and is_at(descriptor, new):
        return descriptor
    os.close(descriptor)
    return None


@contextmanager
def _held_aside(path: Path) -> Iterator[None]:
    """Hold a directory while it may have a name that a `sweep` treats."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all of ``content``, or raise `OSError`: the system cuts a write of over 2 GiB short."""
    while content:
        content = content[os.write(descriptor, content) :]
