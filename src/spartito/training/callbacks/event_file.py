"""Writes scalars as TensorBoard reads them, without importing TensorFlow or starting threads.

An event file is a row of records: length (8 bytes), its checksum, a protocol buffer, its
checksum; the checksum is CRC-32C (RFC 3720), rotated and shifted by a constant so that a
checksum of checksums stays one.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spartito.wire.interfaces import own_name

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8
_VERSION = "brain.Event:2"


class EventFile:
    """One new event file in ``directory``, which is made when it is not there."""

    def __init__(self, directory: Path) -> None:
        """Create the file; an `OSError` when that is not allowed."""
        directory.mkdir(parents=True, exist_ok=True)
        stamp = f"{time.time():.6f}.{own_name()}.{os.getpid()}"
        self._file = (directory / f"events.out.tfevents.{stamp}").open("xb")
        self._write(file_version=_VERSION)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add ``values`` at ``step``; they are in the file when this returns."""
        tags = [{"tag": tag, "simple_value": float(value)} for tag, value in values.items()]
        self._write(step=step, summary={"value": tags})

    def close(self) -> None:
        """Close the file; calling it again changes nothing."""
        self._file.close()

    def _write(self, **event: Any) -> None:
        # Takes 30 ms to import, which only those pay who write events.
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

        data: bytes = Event(wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(length + _checksum(length) + data + _checksum(data))
        self._file.flush()


def _table() -> list[int]:
    rows = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        rows.append(value)
    return rows


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The CRC-32C of ``data``."""
    value = 0xFFFFFFFF
    for byte in data:
        value = (value >> 8) ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def _checksum(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + _MASK) & 0xFFFFFFFF)
