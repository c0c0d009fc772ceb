"""Which image files lie below a directory: the same for training and for the check."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spartito.data.images.headers import EXTENSIONS
from spartito.errors import UserError


@dataclass(frozen=True, slots=True)
class Files:
    """The image files below a directory, sorted, and how many others were passed over."""

    images: tuple[str, ...]
    ignored: int


def image_files(directory: Path | str, extensions: Sequence[str] = EXTENSIONS) -> Files:
    """All files below ``directory``, at any depth, whose name ends as an image's does.

    Names with a dot in front (``.DS_Store``, ``._1.jpg``) are passed over as hidden. A linked
    folder is followed, each folder is read once. Raises `UserError` for what cannot be listed.
    """
    names = list(_walk(os.fspath(directory), set()))
    images = tuple(n for n in names if is_image(os.path.basename(n), extensions))
    return Files(images, len(names) - len(images))


def has_images(path: Path | str) -> bool:
    """Whether ``path`` is a folder with an image file below it."""
    return os.path.isdir(path) and bool(image_files(path).images)


def subfolders(directory: Path | str) -> tuple[str, ...]:
    """The names of the folders directly in ``directory``, sorted, hidden ones left out."""
    return tuple(
        e.name
        for e in _entries(os.fspath(directory))
        if _is_folder(e) and not e.name.startswith(".")
    )


def is_image(name: str, extensions: Sequence[str]) -> bool:
    """Whether a file of this name is read as an image: it ends as one, and is not hidden."""
    return not name.startswith(".") and name.lower().endswith(tuple(map(str.lower, extensions)))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # Of a link to itself `DirEntry.is_dir` raises; of a plain file it costs nothing.
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _walk(directory: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    entries = _entries(directory)
    status = os.stat(directory)
    if (status.st_dev, status.st_ino) in seen:  # a link back up
        return
    seen.add((status.st_dev, status.st_ino))
    for entry in entries:
        if not _is_folder(entry):
            yield entry.path
        elif not entry.name.startswith("."):
            yield from _walk(entry.path, seen)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda e: e.name)
    except FileNotFoundError:
        raise UserError(f"directory {directory!r} does not exist", "Check the path.") from None
    except NotADirectoryError:
        raise UserError(f"{directory!r} is not a directory", "Name the folder above it.") from None
    except OSError as error:
        raise UserError(
            f"directory {directory!r} cannot be listed: {error.strerror}", "Check its permissions."
        ) from error
