"""Messages between doctors, of bounded length, and each wait for one with an end."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec

from spartito.doctor.findings import Outcome, Target
from spartito.doctor.transport.messages import MOST_BYTES, PURPOSE, FromAny
from spartito.wire.dialing import UnknownNameError
from spartito.wire.dialing import connect as call
from spartito.wire.frames import ProtocolError, Wire
from spartito.wire.handshake import OtherProgramError, OtherReleaseError, SecretError, prove
from spartito.wire.secret import Key
from spartito.wire.streams import Connection as Secured
from spartito.wire.streams import peer_host

LONGEST = 1 << 20
"""Bytes of one message at most: facts of a hundred tasks fit, floods do not."""

SMALL = 512
"""Bytes of a packet that passes everywhere: what is said goes in these, on a line that drops large
ones too, and only what is measured in packets as training sends them."""


class PeerError(Exception):
    """There is no doctor at the other end, or it stopped responding; ``outcome`` says how."""

    def __init__(self, outcome: Outcome, detail: str = "") -> None:
        super().__init__(f"{outcome}: {detail}")
        self.outcome, self.detail = outcome, detail


class Connection(AbstractContextManager["Connection"]):
    """One connection to another doctor. ``end`` is a time of `time.monotonic`.

    Everything raises `PeerError` when the other side is gone, silent until ``end``, or no doctor.
    """

    def __init__(self, secured: Secured) -> None:
        with _peer_errors():
            self._wire = Wire(secured, FromAny, limit=MOST_BYTES)
            self._wire.header_limit = LONGEST
            self.host = peer_host(secured)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        self._wire.close()

    def send(self, message: msgspec.Struct, end: float, data: bytes | memoryview = b"") -> None:
        """Send ``message`` and the bytes that belong to it."""
        with _peer_errors():
            self._wire.timeout = _left(end)
            self._wire.send(message, data)

    def receive(self, kind: Any, end: float) -> Any:
        """The next message, which must be one of ``kind``; its bytes are forgotten."""
        with _peer_errors():
            self._wire.timeout = _left(end)
            message = self._wire.receive()
        if not isinstance(message, kind):
            raise PeerError(Outcome.OTHER_PROGRAM, f"{type(message).__name__} was not expected")
        return message


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
        packets = None if large else SMALL
        connected = call(target.host, target.port, _left(end), packets=packets)
    except OSError as error:
        raise PeerError(_why_not_connected(error), str(error)) from error
    try:
        with _peer_errors():
            return Connection(prove(connected, "it", key, PURPOSE, end))
    except BaseException:
        connected.close()
        raise


@contextmanager
def _peer_errors() -> Iterator[None]:
    """What may happen to a connection, as a `PeerError`."""
    try:
        yield
    except TimeoutError as error:
        raise PeerError(Outcome.SILENT, str(error)) from error
    except OSError as error:
        raise PeerError(Outcome.CLOSED, str(error)) from error
    except ProtocolError as error:
        raise PeerError(Outcome.OTHER_PROGRAM, str(error)) from error
    except OtherProgramError as error:
        raise PeerError(Outcome.OTHER_PROGRAM) from error
    except OtherReleaseError as error:
        raise PeerError(Outcome.OTHER_RELEASE, str(error).splitlines()[0]) from error
    except SecretError as error:
        raise PeerError(Outcome.OTHER_SECRET) from error


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time is left")
    return left


def _why_not_connected(error: OSError) -> Outcome:
    if isinstance(error, UnknownNameError):
        return Outcome.UNRESOLVED
    if isinstance(error, TimeoutError):
        return Outcome.DROPPED
    return Outcome.REFUSED if error.errno == errno.ECONNREFUSED else Outcome.UNROUTABLE
