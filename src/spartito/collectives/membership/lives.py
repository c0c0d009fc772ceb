"""Whether the tasks of this machine live: each holds a file lock, which ends with its process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from spartito.forks import keep_from_forks


class Lives:
    """The life locks of a group on one machine.

    Making one takes the lock of rank ``rank``; `open` opens those of the others when all have
    made theirs. The kernel drops a lock with its process, however that ends; forks do not get it.

    Args:
        rank: Our rank.
        path: The path of the lock file of each rank.
    """

    def __init__(self, rank: int, path: Callable[[int], Path]) -> None:
        self._rank, self._path = rank, path
        own = os.open(path(rank), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._files = {rank: own}
        keep_from_forks(own)
        fcntl.flock(own, fcntl.LOCK_EX)

    def open(self, size: int) -> None:
        """Open the files of all ``size`` ranks."""
        for rank in range(size):
            if rank != self._rank:
                self._files[rank] = os.open(self._path(rank), os.O_RDWR | os.O_NOFOLLOW)

    def alive(self, rank: int) -> bool:
        """Whether the process of ``rank`` still holds its lock."""
        file = self._files.get(rank)
        if file is None:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
        return False

    def unlink(self) -> None:
        """Take away the name of our file: who opened it keeps it."""
        self._path(self._rank).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of our lock, and close all files. May be called again."""
        while self._files:
            os.close(self._files.popitem()[1])
