"""A connection to another rank: frames go out in their order, and those that come are kept.

A frame is a head and its bytes. The head says what the frame is for, so that a rank knows what it
reads before it takes the bytes:

    | kind | step | tag | call | bytes |   8 bytes each
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from spartito.backend.errors import MOST_TEXT
from spartito.backend.memory import RESERVE, Bytes
from spartito.wire.flow import Flow
from spartito.wire.streams import Connection, send_no_more

HEAD = struct.Struct("<5q")
PART, MESSAGE, FAREWELL = range(3)
"""Kinds: a part of a collective call, a message, and why a rank makes no more calls."""
MOST = RESERVE
"""Bytes of a frame that nobody waits for yet, and of what one connection keeps to be sent."""
MOST_DRAINED = 1 << 26  # bytes that are read before a connection is closed


class BrokenFrameError(Exception):
    """What came is no frame."""


@dataclass(slots=True, eq=False)
class Frame:
    """What comes; ``is_whole`` once its bytes are here."""

    kind: int
    step: int
    tag: int
    call: int
    row: Bytes
    is_whole: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """The part of a call that is waited for, and where its bytes are to lie."""

    step: int
    call: int
    row: Bytes

    def fits(self, frame: Frame) -> bool:
        """Whether it is this one that came."""
        return (frame.step, frame.call, len(frame.row)) == (self.step, self.call, len(self.row))


class Link:
    """A connection to another rank; ``connection`` does not block."""

    def __init__(self, connection: Connection) -> None:
        self.number = connection.fileno()
        self.is_gone = False
        self.want: Want | None = None
        self.parts: deque[Frame] = deque()
        self.messages: list[Frame] = []
        self.farewell: Frame | None = None
        self._connection, self._flow = connection, Flow(connection)
        self._lock = threading.Lock()  # a thread sends what the system did not take at once
        self._head = bytearray(HEAD.size)
        self._flow.into = [memoryview(self._head)]
        self._frame: Frame | None = None

    @property
    def is_sent(self) -> bool:
        """Whether the system has taken all that goes out."""
        return not self._flow.out

    @property
    def moved(self) -> int:
        """Bytes so far, both ways."""
        return self._flow.sent + self._flow.received

    @property
    def unsent(self) -> int:
        """The bytes that the system has not taken."""
        return sum(map(len, self._flow.out))

    def push(
        self, kind: int, step: int, tag: int, call: int, row: Bytes, *, keep: bool = False
    ) -> None:
        """Send a frame, as far as it goes now; ``keep``: the row may be written to afterwards."""
        head = HEAD.pack(kind, step, tag, call, len(row))
        with self._lock:
            self._flow.out += [memoryview(head), *([row.data] if len(row) else [])]
            self._send()
            if keep and self._flow.out and len(row):
                self._flow.out[-1] = memoryview(bytes(self._flow.out[-1]))

    def flush(self) -> bool:
        """Send what goes now; whether nothing is left."""
        if self._flow.out:
            with self._lock:
                self._send()
        return not self._flow.out

    def expect(self, want: Want) -> None:
        """Wait for this part of a call from now on."""
        self.want = want
        self._take()

    def pull(self) -> bool:
        """Read what is here of one frame at most; whether there was anything."""
        if self.is_gone:
            return False
        try:
            came = self._flow.receive()
        except OSError:
            self.is_gone = True
            return False
        if not self._flow.into:
            self._next()
        return came

    def close(self) -> None:
        """Close the connection; the other end can read all that was sent."""
        with suppress(OSError):
            send_no_more(self._connection)
            drained = 0
            # Closed with bytes that nobody read, the system would take back what was sent.
            while drained < MOST_DRAINED and (data := self._connection.recv(1 << 16)):
                drained += len(data)
        self.is_gone, self._flow.out = True, []
        self._connection.close()

    def _send(self) -> None:
        try:
            self._flow.send()
        except OSError:  # it is gone: what it sent before is still to be read
            self._flow.out = []

    def _next(self) -> None:
        """A head or the bytes of a frame are complete."""
        if self._frame is None:
            self._frame = self._begun()
            if len(self._frame.row):
                self._flow.into = [self._frame.row.data]
                return
        self._frame.is_whole = True
        self._frame = None
        self._flow.into = [memoryview(self._head)]
        self._take()

    def _begun(self) -> Frame:
        kind, step, tag, call, size = HEAD.unpack(self._head)
        want = self.want
        if kind not in (PART, MESSAGE, FAREWELL) or not 0 <= size <= (
            MOST_TEXT if kind == FAREWELL else max(MOST, len(want.row) if want else 0)
        ):
            raise BrokenFrameError
        frame = Frame(kind, step, tag, call, np.empty(size, dtype=np.uint8))
        if kind == PART:
            if want is not None and not self.parts and want.fits(frame):
                frame.row = want.row
            self.parts.append(frame)
        elif kind == MESSAGE:
            self.messages.append(frame)
        else:
            self.farewell = frame
        return frame

    def _take(self) -> None:
        """Give the first part that came to who waits for one."""
        want = self.want
        if want is None or not self.parts:
            return
        first = self.parts[0]
        if first.is_whole and want.fits(first):
            self.parts.popleft()
            if first.row is not want.row:
                want.row[:] = first.row
            self.want = None
