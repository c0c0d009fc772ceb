"""How many updates a server has made, in a file that outlives its process."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_NUMBER = struct.Struct("<Q")


class Tally:
    """A number in eight bytes that lie mapped: it costs nothing to write at every update.

    What a killed process wrote last is there when the next one opens the file; what the machine
    itself forgets, it forgets.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            file.truncate(_NUMBER.size)
            self._memory = mmap.mmap(file.fileno(), _NUMBER.size)

    @property
    def value(self) -> int:
        """The number; 0 in a new file."""
        found: int = _NUMBER.unpack_from(self._memory)[0]
        return found

    @value.setter
    def value(self, number: int) -> None:
        _NUMBER.pack_into(self._memory, 0, number)
