"""Calls at the ports of tasks, as those who know the job's secret make them, and as others do."""

from __future__ import annotations

import socket
import time

from spartito.wire.handshake import challenge, prove
from spartito.wire.secret import NO_SECRET, Key
from spartito.wire.streams import Connection

LIMIT = 30.0


def call(port: int, purpose: str, key: Key = NO_SECRET, host: str = "127.0.0.1") -> Connection:
    """A connection to the task at ``port`` that knows its secret, and proved it."""
    below = socket.create_connection((host, port), LIMIT)
    try:
        connection = prove(below, "the task", key, purpose, time.monotonic() + LIMIT)
    except BaseException:
        below.close()
        raise
    connection.settimeout(LIMIT)
    return connection


def accept(listener: socket.socket, purpose: str, key: Key = NO_SECRET) -> Connection:
    """The next connection at ``listener``, whose caller proved that it knows the secret."""
    return challenge(listener.accept()[0], key, purpose, time.monotonic() + LIMIT)


def read_to_end(connection: Connection) -> bytes:
    """What the other end says until it closes the connection; it must within the limit."""
    heard = b""
    connection.settimeout(LIMIT)
    try:
        while more := connection.recv(4096):
            heard += more
    except ConnectionResetError:  # what we said was not read to its end
        pass
    return heard
