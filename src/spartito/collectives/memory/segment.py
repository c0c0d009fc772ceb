"""Memory that several processes share: a file that they map, whose name goes at once.

Who has mapped it holds a lock on it. So what is left where all of a job were killed before the name
went is found by the next job on the machine, and removed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from spartito.errors import UserError
from spartito.notes import warn
from spartito.system import reserve as claim

PREFIX = "spartito-"
_NAME = re.compile(rf"{PREFIX}[0-9a-f]{{16}}(\.\d+)?")
"""Of a segment, and of the locks of its ranks."""
OLD = 60.0  # seconds after which a file that nobody has locked is left over
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}

_NOT_OURS = {errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENXIO}


class Segment:
    """A file mapped by several processes; its name goes once all of them have it."""

    def __init__(self, path: Path, map_: mmap.mmap) -> None:
        self.path = path
        self.map = self.view = map_

    @classmethod
    def create(cls, size: int, directories: Sequence[Path], reserve: int = 0) -> Segment:
        """Map a new file of ``size`` bytes in the first of ``directories`` that has the space.

        The space is claimed at once: a mapping that finds its disk full later ends by SIGBUS.
        Behind it are ``reserve`` bytes, of which each part takes space from its `claim` on.
        """
        for directory in directories:
            try:
                return cls._create_in(directory, size, reserve)
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise
                warn(
                    "%s cannot hold %.1f MB of shared memory: %s",
                    directory, size / 1e6, error.strerror,
                )  # fmt: skip
        raise UserError(
            f"no space for {size / 1e6:.1f} MB of shared memory in "
            f"{' or '.join(map(str, directories))}",
            "Free some there, or give the container more with --shm-size.",
        )

    @classmethod
    def _create_in(cls, directory: Path, size: int, reserve: int) -> Segment:
        sweep(directory)
        path = directory / f"{PREFIX}{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)  # the mapping has the file open, and so the lock
            claim(fd, 0, size)
            if reserve:
                os.ftruncate(fd, size + reserve)
            return cls(path, mmap.mmap(fd, size + reserve))
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)

    @classmethod
    def attach(cls, path: Path, size: int) -> Segment:
        """Map the file that another process of this user created.

        Its name may come from a store that asks nobody who he is: a link, or what is no file of
        this user's, is a `UserError`.
        """
        try:  # a pipe of another's must not be waited for
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _NOT_OURS:
                raise _not_ours(path) from error
            raise
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
                raise _not_ours(path)
            fcntl.flock(fd, fcntl.LOCK_SH)
            return cls(path, mmap.mmap(fd, size))
        finally:
            os.close(fd)

    def open_view(self) -> None:
        """Map the file anew, while it has a name: as ``view``, what is written stays here."""
        fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            self.view = mmap.mmap(fd, len(self.map), flags=mmap.MAP_PRIVATE)
        finally:
            os.close(fd)

    def claim(self, file: int, offset: int, size: int) -> None:
        """Claim the space of a part; ``file`` is the segment's file, opened anew.

        Raises:
            UserError: There is no space for it.
        """
        try:
            claim(file, offset, size)
        except OSError as error:
            raise UserError(
                f"no space for {size / 1e6:.1f} MB of shared memory in {self.path.parent}: "
                f"{error.strerror}",
                "Free some there, or give the container more with --shm-size.",
            ) from error

    def tensor(
        self, offset: int, numel: int, dtype: torch.dtype, map_: mmap.mmap | None = None
    ) -> Tensor:
        """``numel`` elements of the mapping, or of its ``view``, from byte ``offset`` on."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(map_ or self.map, dtype=dtype, count=numel, offset=offset)


def sweep(directory: Path) -> None:
    """Remove the files that this user's jobs have left in ``directory``, of which nobody lives."""
    for path in directory.iterdir():
        if not _NAME.fullmatch(path.name):
            continue
        with suppress(OSError):  # another's, locked, or gone meanwhile
            status = path.lstat()
            is_ours = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
            if is_ours and time.time() - status.st_mtime > OLD:
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(fd)


def _not_ours(path: Path) -> UserError:
    return UserError(
        f"the shared memory {path} is no file of this user's",
        "Run all replicas of a machine as one user, or take communication='sockets'.",
    )
