"""The secret of a job in containers: a file beside the compose file, which the engine mounts."""

from __future__ import annotations

import os
from pathlib import Path

from spartito.errors import UserError
from spartito.launch.containers.file import JobFile, owner_of
from spartito.wire.secret import new_secret

MODE = 0o600


def secret_name(job: str) -> str:
    """The file's name for the job ``job``."""
    return f"{job}.secret"


def write_secret(path: Path) -> bool:
    """Write a new secret for this user alone; False if there is a file already, which stays."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, MODE)
    except FileExistsError:
        return False
    with open(descriptor, "w") as file:
        file.write(f"{new_secret()}\n")
    return True


def make_secret(job: JobFile) -> Path | None:
    """Make the secret that the file names, for the containers' user; returns its path if new.

    Raises `UserError` where it cannot be written, or must come from another machine.
    """
    path = job.secret
    if path is None:
        return None
    if job.is_partial and not path.exists():
        raise UserError(
            f"there is no {path}: all machines of the job need the same",
            f"Copy it from where {job.path} was written.",
        )
    try:
        made = write_secret(path)
        owner = owner_of(str(next(iter(job.services.values())).get("user", "0")))
        if os.getuid() == 0 and owner is not None:
            os.chown(path, *owner, follow_symlinks=False)
    except OSError as error:
        raise UserError(f"the secret {path} cannot be written: {error.strerror}") from error
    return path if made else None
