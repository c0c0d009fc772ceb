"""Lines of JSON over a socket, each of bounded length and each wait with an end."""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from spartito.collectives.handshake import OtherProgramError, SecretError, prove

LONGEST_LINE = 1 << 20
"""Bytes of one message at most: facts of a hundred tasks fit, floods do not."""

PURPOSE = "doctor"
"""What a connection between doctors is for, in its handshake."""

READ_SIZE = 1 << 16

T = TypeVar("T")


class GarbageError(Exception):
    """What came is no message of a doctor."""


class UnknownPeerError(GarbageError):
    """Another program is there."""


class OutsiderError(GarbageError):
    """A task is there that does not know our secret."""


class ClosedError(OSError):
    """The other side closed the connection."""


@dataclass
class Talk:
    """One connection to another doctor. ``end`` is a time of `time.monotonic`.

    Raises `TimeoutError` at the end, `ClosedError` when the other side is gone, `GarbageError`
    when it is no doctor.
    """

    connection: socket.socket
    _kept: bytearray = field(default_factory=bytearray)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.connection.close()

    def prove(self, key: bytes, end: float) -> None:
        """Prove to a doctor that called nobody yet that we know ``key``, and have it do the same.

        Raises `UnknownPeerError` for another program, `OutsiderError` for a task that does not.
        """
        try:
            prove(self.connection, "it", key, PURPOSE, end)
        except OtherProgramError as error:
            raise UnknownPeerError("it says what no task of Spartito says") from error
        except SecretError as error:
            raise OutsiderError("it does not know our secret") from error

    def say(self, message: msgspec.Struct, end: float, payload: bytes | memoryview = b"") -> None:
        """Send ``message`` and the bytes that belong to it."""
        self._wait_until(end)
        self.connection.sendall(msgspec.json.encode(message) + b"\n")
        if payload:
            self.connection.sendall(payload)

    def hear(self, kind: Any, end: float) -> Any:
        """The next message, which must be one of ``kind``."""
        while (cut := self._kept.find(b"\n")) < 0:
            if len(self._kept) > LONGEST_LINE:
                raise GarbageError("a line without an end")
            self._kept += self._read(end)
        line = bytes(self._kept[:cut])
        del self._kept[: cut + 1]
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise GarbageError(f"{line[:40]!r}: {error}") from error

    def skip(self, size: int, end: float) -> None:
        """Read ``size`` bytes and forget them."""
        left = size - len(self._kept)
        del self._kept[:size]
        while left > 0:
            left -= len(self._read(end, left))

    def _read(self, end: float, most: int = READ_SIZE) -> bytes:
        self._wait_until(end)
        data = self.connection.recv(min(most, 1 << 20))
        if not data:
            raise ClosedError("the other side closed the connection")
        return data

    def _wait_until(self, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time is left")
        self.connection.settimeout(left)


def meet(host: str, port: int, end: float, key: bytes) -> Talk:
    """As `call`; both ends know ``key`` then. Raises `GarbageError` too, where they do not."""
    talk = call(host, port, end)
    try:
        talk.prove(key, end)
    except BaseException:
        talk.close()
        raise
    return talk


def call(host: str, port: int, end: float) -> Talk:
    """A connection to ``host:port``; raises `OSError`, `TimeoutError` at ``end``."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time is left")
    connection = socket.create_connection((host, port), left)
    try:
        if connection.getsockname() == connection.getpeername():
            # Nobody listens, and the system chose this very port for our own end.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        connection.close()
        raise
    return Talk(connection)
