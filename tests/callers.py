"""Calls at the ports of tasks, as those who know the job's secret make them, and as others do."""

from __future__ import annotations

import socket
import time

from spartito.collectives.handshake import challenge, prove

LIMIT = 30.0


def call(port: int, purpose: str, key: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
    """A connection to the task at ``port`` that knows its secret, and proved it."""
    connection = socket.create_connection((host, port), LIMIT)
    try:
        prove(connection, "the task", key, purpose, time.monotonic() + LIMIT)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(LIMIT)
    return connection


def accept(listener: socket.socket, purpose: str, key: bytes = b"") -> socket.socket:
    """The next connection at ``listener``, whose caller proved that it knows the secret."""
    connection = listener.accept()[0]
    challenge(connection, key, purpose, time.monotonic() + LIMIT)
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    """What the other end says until it closes the connection; it must within the limit."""
    heard = b""
    connection.settimeout(LIMIT)
    try:
        while more := connection.recv(4096):
            heard += more
    except ConnectionResetError:  # what we said was not read to its end
        pass
    return heard
