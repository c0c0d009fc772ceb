"""Sleep until another process changes a word of shared memory: Linux's futex."""

from __future__ import annotations

import ctypes
import platform
import time

_NUMBERS = {"x86_64": 202, "amd64": 202}
_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1
_NUMBER = _NUMBERS.get(platform.machine().lower(), -1) if platform.system() == "Linux" else -1
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
        if _NUMBER < 0:
            time.sleep(min(seconds, 0.0001))
            return
        whole = int(seconds)
        limit = _Time(whole, int((seconds - whole) * 1e9))
        _syscall(
            _NUMBER, self._pointer, _WAIT, ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.byref(limit)
        )

    def wake(self) -> None:
        """Wake all who sleep, after the word was changed."""
        if _NUMBER >= 0:
            _syscall(_NUMBER, self._pointer, _WAKE, _EVERYBODY)
