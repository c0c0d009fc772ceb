"""A folder that is this user's alone, at a name that others could have taken before."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from spartito.errors import UserError


def private_directory(path: Path, advice: str) -> Path:
    """Make the folder ``path`` with mode 0700, or take the one there if it is ours; returns it.

    Links are not followed. Raises `UserError`, with ``advice``, for a folder of another user, one
    that others could write to, and what is no folder.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        why = "it is a link" if path.is_symlink() else error.strerror
        raise UserError(f"{path} cannot be used: {why}", advice) from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise UserError(f"{path} belongs to another user (uid {found.st_uid})", advice)
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(found.st_mode)
            raise UserError(f"{path} is open to others: its mode is {mode:04o}", advice)
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path
