"""Bytes on their way over a connection that does not block, from and into where they lie."""

from __future__ import annotations

import errno

from spartito.wire.limits import MOST_BUFFERS
from spartito.wire.streams import Connection, rest

Views = list[memoryview]


class Flow:
    """What is left to be sent and to be received, neither of which waits.

    Attributes:
        out: What is to be sent.
        into: Where that is to lie which comes.
        sent: Bytes so far.
        received: The same.
    """

    __slots__ = ("_connection", "into", "out", "received", "sent")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.out: Views = []
        self.into: Views = []
        self.sent = self.received = 0

    def send(self) -> None:
        """Send what goes now."""
        try:
            while self.out:
                count = self._connection.sendmsg(self.out[:MOST_BUFFERS])
                self.out = rest(self.out, count)
                self.sent += count
        except BlockingIOError:
            pass

    def receive(self) -> bool:
        """Receive once what is here; whether there was anything.

        Raises `OSError` if the other end closed the connection.
        """
        target = self.into[0]
        try:
            count = self._connection.recv_into(target)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        self.into[:1] = [target[count:]] if count < len(target) else []
        self.received += count
        return True
