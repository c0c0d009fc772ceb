"""Connections that end soon after the other machine is out of reach."""

from __future__ import annotations

import socket
from contextlib import suppress

from spartito.wire.streams import Connection

SILENCE = 2
"""Seconds without a sign of the other machine's kernel after which a connection ends."""


def look_after(connection: Connection, silence: int = SILENCE) -> None:
    """Let the kernel ask the other one whether it is there, and close if it is not.

    A process that is stopped or busy is there: its kernel replies. One that takes no more data for
    so long, as its memory for it is full, counts as silent too.

    Args:
        connection: Whose end is meant.
        silence: Seconds without a reply after which it ends; of these the first half pass until it
            is asked, each second then.
    """
    options = {
        "TCP_KEEPIDLE": max(1, silence // 2),
        "TCP_KEEPINTVL": 1,
        "TCP_USER_TIMEOUT": 1000 * silence,
    }
    with suppress(OSError):  # no TCP
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):  # of Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
