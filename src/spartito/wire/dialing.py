"""Calls: a connection to who listens now, and to a task that may be late."""

from __future__ import annotations

import errno
import socket
import time

from spartito.errors import TaskLostError
from spartito.waiting import Waiting
from spartito.wire.addresses import address
from spartito.wire.handshake import prove
from spartito.wire.limits import ATTEMPT_SECONDS, RETRY_SECONDS
from spartito.wire.secret import Key
from spartito.wire.streams import Connection, Socket, send_at_once

UnknownNameError = socket.gaierror
"""What a call raises to a name that nobody knows."""


def dial(host: str, port: int, name: str, limit: float, end: float | None = None) -> Socket:
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
            return connect(host, port, max(0.01, until - now))
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


def connect(host: str, port: int, seconds: float, *, packets: int | None = None) -> Socket:
    """A blocking connection to whoever listens at ``host:port`` now; no Nagle delay.

    ``packets`` are the bytes that each packet may have at most, by default as many as the line
    takes. Raises `OSError` if there is none within so many seconds.
    """
    wrong: OSError = socket.gaierror(f"{host} has no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(max(0.001, seconds))
            if packets is not None:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, packets)
            connection.connect(where)
            if connection.getsockname() == connection.getpeername():
                # Nobody listens, and the system chose this very port for our own end.
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            send_at_once(connection)
            connection.settimeout(None)
        except OSError as error:
            connection.close()
            wrong = error
        else:
            return connection
    raise wrong


def connect_here(path: str) -> Socket:
    """A blocking connection to the process of this machine that listens at ``path``."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection
