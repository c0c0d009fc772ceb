"""Sockets between tasks: one that listens at a task's endpoint, one to a task that may be late."""

from __future__ import annotations

import errno
import socket
import time

from spartito.errors import TaskLostError
from spartito.waiting import Waiting
from spartito.wire.addresses import address
from spartito.wire.handshake import prove
from spartito.wire.secret import Key
from spartito.wire.streams import Connection

RETRY_SECONDS = 0.02  # between two looks for a task that does not listen yet
ATTEMPT_SECONDS = 3.0  # for one connection: a name may soon mean another machine


def dial(host: str, port: int, name: str, limit: float, end: float | None = None) -> socket.socket:
    """A blocking connection to task ``name``, once it listens at ``host:port``; no Nagle delay.

    Raises `TaskLostError` that names the task if it does not within ``limit`` seconds; they are
    over at ``end`` of `time.monotonic`, where a part of them has gone by already.
    """
    start = time.monotonic()
    end = start + limit if end is None else end
    where = "" if f"{host}:{port}" in name else f" at {host}:{port}"
    to = where and f" to {address(host, port)}"
    waiting = Waiting(0, [name + where])
    while True:
        try:
            now = time.monotonic()
            until = min(end, start + waiting.after, now + ATTEMPT_SECONDS)
            return _connected(host, port, max(0.01, until - now))
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS >= end:
                raise TaskLostError(
                    f"{name} did not come{to} within {limit:g} s",
                    f"{error.strerror or error}. Start it, correct the address, or let a firewall "
                    "pass this port; SPARTITO_TIMEOUT sets the limit in seconds.",
                ) from error
        waiting.look(time.monotonic() - start, [0], limit)
        time.sleep(RETRY_SECONDS)


def reach(host: str, port: int, name: str, limit: float, *, key: Key, purpose: str) -> Connection:
    """A connection to task ``name``, once it listens at ``host:port`` and both know the secret.

    Raises `TaskLostError` if that takes more than ``limit`` seconds, and `UserError` if another
    program listens there or the secrets differ.
    """
    end = time.monotonic() + limit
    where = f"{host}:{port}"
    called = name if where in name else f"{name} at {where}"
    while True:
        connection = dial(host, port, name, limit, end)
        try:
            return prove(connection, called, key, purpose, end)
        except OSError as error:  # it died, or had too many callers: it may be there again
            connection.close()
            if time.monotonic() + RETRY_SECONDS >= end:
                raise TaskLostError(
                    f"{called} did not reply within {limit:g} s",
                    "It may be stopped: look at its last lines. "
                    "SPARTITO_TIMEOUT sets the limit in seconds.",
                ) from error
        except BaseException:
            connection.close()
            raise
        time.sleep(RETRY_SECONDS)


def _connected(host: str, port: int, limit: float) -> socket.socket:
    connection = socket.create_connection((host, port), limit)
    try:
        if connection.getsockname() == connection.getpeername():
            # Nobody listens, and the system chose this very port for our own end.
            raise OSError(errno.ECONNREFUSED, "Connection refused")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    return connection
