"""Lines of JSON over a socket, each of bounded length and each wait with an end."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from spartito.decoders import json_decoder
from spartito.doctor.findings import Outcome, Target
from spartito.wire.handshake import OtherProgramError, SecretError, prove
from spartito.wire.secret import Key
from spartito.wire.streams import Connection as Secured

LONGEST_LINE = 1 << 20
"""Bytes of one message at most: facts of a hundred tasks fit, floods do not."""

PURPOSE = "doctor"
"""What a connection between doctors is for, in its handshake."""

READ_SIZE = 1 << 16

SMALL = 512
"""Bytes of a packet that passes everywhere: what is said goes in these, on a line that drops large
ones too, and only what is measured in packets as training sends them."""


class PeerError(Exception):
    """There is no doctor at the other end, or it stopped responding; ``outcome`` says how."""

    def __init__(self, outcome: Outcome, detail: str = "") -> None:
        super().__init__(f"{outcome}: {detail}")
        self.outcome, self.detail = outcome, detail


@dataclass
class Connection(AbstractContextManager["Connection"]):
    """One connection to another doctor. ``end`` is a time of `time.monotonic`.

    Everything raises `PeerError` when the other side is gone, silent until ``end``, or no doctor.
    """

    socket: Secured
    _received: bytearray = field(default_factory=bytearray)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def send(self, message: msgspec.Struct, end: float, data: bytes | memoryview = b"") -> None:
        """Send ``message`` and the bytes that belong to it."""
        with _peer_errors():
            self._wait_until(end)
            self.socket.sendall(msgspec.json.encode(message) + b"\n")
            if data:
                self.socket.sendall(data)

    def receive(self, kind: Any, end: float) -> Any:
        """The next message, which must be one of ``kind``."""
        while (cut := self._received.find(b"\n")) < 0:
            if len(self._received) > LONGEST_LINE:
                raise PeerError(Outcome.OTHER_PROGRAM, "a line without an end")
            self._received += self._read(end)
        line = bytes(self._received[:cut])
        del self._received[: cut + 1]
        try:
            return json_decoder(kind).decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PeerError(Outcome.OTHER_PROGRAM, f"{line[:40]!r}: {error}") from error

    def skip(self, size: int, end: float) -> None:
        """Read ``size`` bytes and forget them."""
        left = size - len(self._received)
        del self._received[:size]
        while left > 0:
            left -= len(self._read(end, left))

    def _read(self, end: float, most: int = READ_SIZE) -> bytes:
        with _peer_errors():
            self._wait_until(end)
            data = self.socket.recv(min(most, 1 << 20))
        if not data:
            raise PeerError(Outcome.CLOSED, "the other side closed the connection")
        return data

    def _wait_until(self, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time is left")
        self.socket.settimeout(left)


def connect(target: Target, end: float, key: Key, *, large: bool = False) -> Connection:
    """A connection to the doctor of ``target``; both have proved that they know ``key``.

    Args:
        target: where it listens.
        end: the end of the wait.
        key: what both know.
        large: let both send packets as large as the interface takes, not only `SMALL` ones.

    Returns:
        The connection.

    Raises:
        PeerError: there is none until ``end``, or it does not know the key.
    """
    try:
        connected = _dial(target, end, large)
    except OSError as error:
        raise PeerError(_why_not_connected(error), str(error)) from error
    try:
        with _peer_errors():
            secured = prove(connected, "it", key, PURPOSE, end)
    except BaseException:
        connected.close()
        raise
    return Connection(secured)


@contextmanager
def _peer_errors() -> Iterator[None]:
    """What may happen to a connection, as a `PeerError`."""
    try:
        yield
    except TimeoutError as error:
        raise PeerError(Outcome.SILENT, str(error)) from error
    except OSError as error:
        raise PeerError(Outcome.CLOSED, str(error)) from error
    except OtherProgramError as error:
        raise PeerError(Outcome.OTHER_PROGRAM) from error
    except SecretError as error:
        raise PeerError(Outcome.OTHER_SECRET) from error


def _dial(target: Target, end: float, large: bool) -> socket.socket:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time is left")
    connected = _connected(target, left, large)
    try:
        if connected.getsockname() == connected.getpeername():
            # Nobody listens, and the system chose this very port for our own end.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        connected.close()
        raise
    return connected


def _connected(target: Target, seconds: float, large: bool) -> socket.socket:
    """As `socket.create_connection`, which sets no option before it connects."""
    wrong: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        target.host, target.port, type=socket.SOCK_STREAM
    ):
        dialled = socket.socket(family, kind, protocol)
        try:
            dialled.settimeout(seconds)
            if not large:
                dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL)
            dialled.connect(address)
        except OSError as error:
            dialled.close()
            wrong = error
        else:
            return dialled
    raise wrong or socket.gaierror(f"{target.host} has no address")


def _why_not_connected(error: OSError) -> Outcome:
    if isinstance(error, socket.gaierror):
        return Outcome.UNRESOLVED
    if isinstance(error, TimeoutError):
        return Outcome.DROPPED
    return Outcome.REFUSED if error.errno == errno.ECONNREFUSED else Outcome.UNROUTABLE
