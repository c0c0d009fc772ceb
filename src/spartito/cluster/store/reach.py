"""Connections that end soon after the other machine is out of reach."""

from __future__ import annotations

import socket
from contextlib import suppress

SILENCE = 2
"""Seconds without a sign of the other machine's kernel after which a connection ends."""


def look_after(connection: socket.socket) -> None:
    """Let the kernel ask the other one each second whether it is there, and close if it is not.

    A process that is stopped or busy is there: its kernel replies.
    """
    options = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_USER_TIMEOUT": 1000 * SILENCE}
    with suppress(OSError):  # no TCP
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):  # of Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
