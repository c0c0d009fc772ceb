"""What a store was told, in a file: one that is killed comes back with its values.

Each record is a request as it came: its length, a checksum, its bytes. A record that was cut off
when the process was killed is the last, and was not replied to yet: it is left out. It is written
for a process that dies, not for a machine that does: nothing is forced to the disk.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from spartito.cluster.store.protocol import Add, Delete, Request, Retire, Set, Swap, request_of

HEAD = struct.Struct("<II")
"""The length of a record and its checksum; the record follows."""
CHANGES = Add | Delete | Retire | Set | Swap
"""What is kept. A `Hold` ends with its connection, and so with the store."""


class Journal:
    """The requests that changed something.

    Args:
        path: The file; it is made where there is none.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)

    def requests(self) -> Iterator[Request]:
        """Those of earlier stores, in order; what was cut off at the end is cut off."""
        with open(os.dup(self._file), "rb") as file:
            file.seek(0)
            whole = 0
            for record in records(file):
                whole = file.tell()
                yield request_of(record)
        os.truncate(self._file, whole)

    def write(self, request: Request) -> None:
        """Keep a request that was done.

        Args:
            request: It.

        Raises:
            OSError: The disk is full: what was written of it is taken back.
        """
        if isinstance(request, CHANGES):
            record = framed(msgspec.msgpack.encode(request))
            before = os.lseek(self._file, 0, os.SEEK_END)
            if os.write(self._file, record) < len(record):
                os.truncate(self._file, before)
                raise OSError("the disk is full")


def framed(record: bytes) -> bytes:
    """A record as a journal has it: behind its length and checksum."""
    return HEAD.pack(len(record), zlib.crc32(record)) + record


def records(file: BinaryIO) -> Iterator[bytes]:
    """The records of a journal, from where ``file`` is, up to the first that is torn."""
    while len(head := file.read(HEAD.size)) == HEAD.size:
        size, checksum = HEAD.unpack(head)
        record = file.read(size)
        if len(record) < size or zlib.crc32(record) != checksum:
            return
        yield record
