"""What a forked process must not keep open: by it other tasks see whether we live.

Worker processes of a DataLoader are forks of their replica, and live on for seconds when it is
killed. A lock or a connection of the replica that they hold too would hide its death so long.
"""

from __future__ import annotations

import os

_ours: dict[int, tuple[int, int]] = {}
"""Descriptors, and by device and inode what they were when they were told: one that was closed
since then may be another's."""


def keep_from_forks(descriptor: int) -> None:
    """Forks of this process get ``descriptor`` as one of the null device."""
    for other in [other for other in _ours if not _is_ours(other)]:
        del _ours[other]
    _ours[descriptor] = _identity(descriptor)


def _is_ours(descriptor: int) -> bool:
    try:
        return _identity(descriptor) == _ours[descriptor]
    except OSError:
        return False


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _let_go() -> None:
    """In the fork. Closed numbers would be used again, under the objects that still have them."""
    mine = [descriptor for descriptor in _ours if _is_ours(descriptor)]
    _ours.clear()
    if mine:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in mine:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)


os.register_at_fork(after_in_child=_let_go)
