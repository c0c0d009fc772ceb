"""Which process of this machine a task is, so that its death can be told for certain."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec


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
        return cls(_namespace(), os.getpid(), _state(os.getpid())[1])

    @property
    def is_over(self) -> bool:
        """Whether the process has certainly ended; False where it cannot be told from here."""
        if not self.namespace or self.namespace != _namespace():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False  # another's, or hidden
        state, began = _state(self.pid)
        return state in ("Z", "X") or 0 < began != self.began


def _namespace() -> str:
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return ""


def _state(pid: int) -> tuple[str, int]:
    """Its state, and its beginning in clock ticks since the boot; 0 where unknown."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return "", 0
