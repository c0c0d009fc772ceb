"""What only shared memory needs of Linux: `shares_memory` says whether there is any."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

from spartito.system.fences import ARM

PAGEMAP = "/proc/self/pagemap"

_FUTEX = 98 if platform.machine().lower() in ARM else 202  # the number of the system call
_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Word:
    """A word of 32 bits at ``address``, for which processes wait. The interpreter goes on."""

    __slots__ = ("_pointer",)

    def __init__(self, address: int) -> None:
        self._pointer = ctypes.c_void_p(address)

    def wait(self, value: int, seconds: float) -> None:
        """Sleep while the word is ``value``, for ``seconds`` at most; may return early."""
        whole = int(seconds)
        limit = _Time(whole, int((seconds - whole) * 1e9))
        _syscall(
            _FUTEX, self._pointer, _WAIT, ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.byref(limit)
        )

    def wake(self) -> None:
        """Wake all who sleep, after the word was changed."""
        _syscall(_FUTEX, self._pointer, _WAKE, _EVERYBODY)


yield_core = _libc.sched_yield
"""As `os.sched_yield`, which keeps the interpreter to itself."""


def page_kinds(first: int, count: int) -> bytearray | None:
    """What the kernel says of pages of this process: a number of 64 bits for each.

    Args:
        first: The number of the first page.
        count: How many.

    Returns:
        None where it hides that.
    """
    found = bytearray(count * 8)
    try:
        file = os.open(PAGEMAP, os.O_RDONLY)
        try:
            is_told = os.preadv(file, [found], first * 8) == len(found)
        finally:
            os.close(file)
    except OSError:
        return None
    return found if is_told else None


def forget_pages(map_: mmap.mmap, offset: int = 0, size: int | None = None) -> None:
    """Let go of a mapping's pages; a private one shows what the file has from then on.

    Args:
        map_: The mapping.
        offset: Where they begin.
        size: Their bytes; None is all that follow.
    """
    map_.madvise(mmap.MADV_DONTNEED, offset, len(map_) - offset if size is None else size)
