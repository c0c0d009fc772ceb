"""A connection to another task: frames go out in their order, and those that come are kept.

A frame is a head and its bytes. The head says what the frame is for, so that a task knows what it
reads before it takes the bytes:

    | kind | step | tag | call | bytes |   8 bytes each
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from spartito.wire.flow import Flow
from spartito.wire.streams import Connection, disconnect, send_no_more

HEAD = struct.Struct("<5q")
PART, MESSAGE, FAREWELL = range(3)
"""Kinds: a part of a collective call, a message, and why a task makes no more calls."""
MOST = 16 << 30
"""Bytes of a frame that nobody waits for yet, and of what one connection keeps to be sent."""
MOST_TEXT = 4096  # bytes of a farewell
MOST_DRAINED = 1 << 26  # bytes that are read before a connection is closed


class BrokenFrameError(Exception):
    """What came is no frame."""


Views = Sequence[memoryview]
"""A row of bytes, in one or more blocks of memory."""


@dataclass(slots=True, eq=False)
class Frame:
    """What comes; ``is_whole`` once its bytes are here.

    They are in ``row``, or where they were wanted: then that is None.
    """

    kind: int
    step: int
    tag: int
    call: int
    size: int
    row: memoryview | None = None
    is_whole: bool = False


@dataclass(slots=True, eq=False)
class Want:
    """The part of a call that is waited for, and where its bytes are to lie."""

    step: int
    call: int
    into: Views
    size: int

    def fits(self, frame: Frame) -> bool:
        """Whether it is this one that came."""
        return frame.call == self.call and frame.step == self.step and frame.size == self.size


class Link:
    """A connection to another task; ``connection`` does not block."""

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
        self, kind: int, step: int, tag: int, call: int, row: Views, size: int, keep: bool = False
    ) -> None:
        """Send a frame, as far as it goes now; ``keep``: the row may be written to afterwards.

        ``row`` has no views without bytes.
        """
        head = HEAD.pack(kind, step, tag, call, size)
        with self._lock:
            self._flow.out += [memoryview(head), *row]
            self._send()
            if keep and self._flow.out and size:
                left = min(len(row), len(self._flow.out))
                kept = [memoryview(bytes(view)) for view in self._flow.out[-left:]]
                self._flow.out[-left:] = kept

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

    def disconnect(self) -> None:
        """End what another thread waits for here."""
        disconnect(self._connection)

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
            if self._frame.size:
                return
        self._frame.is_whole = True
        self._frame = None
        self._flow.into = [memoryview(self._head)]
        self._take()

    def _begun(self) -> Frame:
        kind, step, tag, call, size = HEAD.unpack(self._head)
        want = self.want
        if kind not in (PART, MESSAGE, FAREWELL) or not 0 <= size <= (
            MOST_TEXT if kind == FAREWELL else max(MOST, want.size if want else 0)
        ):
            raise BrokenFrameError
        frame = Frame(kind, step, tag, call, size)
        if kind == PART and want is not None and not self.parts and want.fits(frame):
            self._flow.into = list(want.into)
        else:
            frame.row = np.empty(size, dtype=np.uint8).data
            self._flow.into = [frame.row] if size else []
        if kind == PART:
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
            if first.row is not None:
                at = 0
                for view in want.into:
                    view[:] = first.row[at : at + len(view)]
                    at += len(view)
            self.want = None
