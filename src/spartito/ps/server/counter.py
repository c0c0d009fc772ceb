"""How many updates a server has made, in a file that outlives its process."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from spartito.errors import UserError
from spartito.system import reserve

_NUMBER = struct.Struct("<Q")


class Counter:
    """A number in eight bytes that lie mapped: it costs nothing to write at every update.

    What a killed process wrote last is there when the next one opens the file; what the machine
    itself forgets, it forgets. Raises `UserError` where the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                reserve(file, 0, _NUMBER.size)  # a full disk is an error, no signal
                self._memory = mmap.mmap(file, _NUMBER.size)
            finally:
                os.close(file)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written: {error.strerror}",
                "Free some space there, or name another folder by SPARTITO_SNAPSHOT_DIR.",
            ) from error

    @property
    def value(self) -> int:
        """The number; 0 in a new file."""
        found: int = _NUMBER.unpack_from(self._memory)[0]
        return found

    @value.setter
    def value(self, number: int) -> None:
        _NUMBER.pack_into(self._memory, 0, number)
