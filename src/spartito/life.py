"""Which process of this machine a task is, so that its death can be told for certain."""

from __future__ import annotations

import os
from typing import Self

import msgspec

from spartito.system import process_space, process_start


class Life(msgspec.Struct, frozen=True):
    """A process: its number, where that number counts, and when it began.

    ``namespace`` is the kernel's boot and its space of process numbers, "" where nobody can tell.
    """

    namespace: str
    pid: int
    began: int

    @classmethod
    def own(cls) -> Self:
        """That of this process."""
        return cls(process_space(), os.getpid(), process_start(os.getpid())[1])

    @property
    def is_over(self) -> bool:
        """Whether the process has certainly ended; False where it cannot be told from here."""
        if not self.namespace or self.namespace != process_space():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False  # another's, or hidden
        state, began = process_start(self.pid)
        return state in ("Z", "X") or 0 < began != self.began
