"""Folders for what does not outlive a job: in memory where there are such, and temporary ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from spartito.errors import UserError
from spartito.system import memory_folder


def temporary_folder() -> Path:
    """The folder for temporary files.

    Returns:
        What ``TMPDIR`` says, else one that the system has.

    Raises:
        UserError: ``TMPDIR`` names none, or no such folder can be written.
    """
    named = os.environ.get("TMPDIR")
    if named and not os.path.isdir(named):
        raise UserError(
            f"TMPDIR={named!r} is no folder, so temporary files have none",
            "Make that folder, or unset TMPDIR: then the system's is used.",
        )
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise UserError(
            f"there is no folder for temporary files: {error.strerror}",
            "Set TMPDIR to a folder that can be written.",
        ) from error


def memory_folders() -> list[Path]:
    """The folders for files that processes map: in memory, then the temporary one.

    Raises:
        UserError: As `temporary_folder`.
    """
    first = memory_folder()
    return [*([] if first is None else [first]), temporary_folder()]
