"""What a forked process must not keep open: by it other tasks see whether we live.

Worker processes of a DataLoader are forks of their replica, and live on for seconds when it is
killed. A lock or a connection of the replica that they hold too would hide its death so long.
"""

from __future__ import annotations

import os
import threading

_ours: dict[int, tuple[int, int]] = {}
"""Registered descriptors, with the device and inode that they had then: one that was closed
since then may be another's."""
CLOSED = -1, -1
"""What is found of a descriptor that is closed."""
_turn = threading.Lock()  # of those who change it; a fork asks nobody, as it is alone


def keep_from_forks(descriptor: int) -> None:
    """Forks of this process get ``descriptor`` as one of the null device. Thread-safe."""
    with _turn:
        for other, identity in list(_ours.items()):
            if _identity(other) != identity:
                del _ours[other]
        if (identity := _identity(descriptor)) != CLOSED:
            _ours[descriptor] = identity


def _identity(descriptor: int) -> tuple[int, int]:
    try:
        status = os.fstat(descriptor)
    except OSError:  # it is closed
        return CLOSED
    return status.st_dev, status.st_ino


def _let_go() -> None:
    """In the fork. Closed numbers would be used again, under the objects that still have them."""
    mine = [number for number, identity in _ours.items() if _identity(number) == identity]
    _ours.clear()
    if mine:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in mine:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)


def _begin_fork() -> None:
    global _turn
    _turn = threading.Lock()
    _let_go()


os.register_at_fork(after_in_child=_begin_fork)
