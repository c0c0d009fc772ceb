"""Files with a name that is always the same: a user may have one of that name, which stays.

Each kind of file is known by what is in it. An empty one is nobody's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from spartito.errors import UserError

Known = Callable[[bytes], bool]
"""Whether this is the content of a file that we wrote."""


def has_keys(*keys: str) -> Known:
    """What holds one JSON object with all of these keys."""

    def known(content: bytes) -> bool:
        try:
            found = json.loads(content)
        except ValueError:
            return False
        return isinstance(found, dict) and set(keys) <= set(found)

    return known


def begins_with(*starts: str) -> Known:
    """What begins like this, also if it was cut off there."""
    wanted = [start.encode() for start in starts]
    return lambda content: any(content[: len(each)] == each[: len(content)] for each in wanted)


def contains(*marks: str) -> Known:
    """What has one of these texts in it."""
    return lambda content: any(mark.encode() in content for mark in marks)


def check_own(folder: Path, files: Mapping[str, Known]) -> None:
    """Refuse a folder with a file of the user's that would be replaced.

    Args:
        folder: It may be missing.
        files: What is written there, by name: how each is known.

    Raises:
        UserError: A file of that name is none of ours.
    """
    for name, known in files.items():
        path = folder / name
        try:
            content = path.read_bytes() if path.is_file() else b""
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        if path.is_symlink() or (content and not known(content)):
            raise UserError(
                f"{path} was not written by Spartito, and would be replaced",
                "Name another folder, or move the file somewhere else.",
            )
