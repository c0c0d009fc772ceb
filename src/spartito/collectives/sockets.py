"""Sockets between tasks: one that listens at a task's endpoint, one to a task that may be late."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from spartito.cluster.connection import Connection
from spartito.cluster.endpoints import DRAWN, Endpoint
from spartito.cluster.handshake import prove
from spartito.cluster.listed import address
from spartito.cluster.ports import is_own
from spartito.cluster.secret import Key
from spartito.cluster.spec import is_loopback
from spartito.collectives.waiting import Waiting
from spartito.errors import TaskLostError, UserError
from spartito.log import note, warn

RETRY_SECONDS = 0.02  # between two looks for a task that does not listen yet
ATTEMPT_SECONDS = 3.0  # for one connection: a name may soon mean another machine
RESOLVE_SECONDS = 0.25  # between two questions to a name service that does not know a name yet
BACKLOG = 1024


class UnresolvedError(UserError):
    """A task's own address is a name that nobody knows."""


class TakenError(UserError):
    """Other programs have the ports."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A socket that listens at a `Endpoint`; ``remarks`` are what a user should know of it.

    ``foreign``: the endpoint's host is no address of this machine. ``drawn``: the port that was
    declared is taken, and the system drew another.
    """

    listener: socket.socket
    remarks: tuple[str, ...] = ()
    foreign: bool = False
    drawn: bool = False

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.listener.getsockname()[1])


def listen(endpoint: Endpoint, limit: float) -> socket.socket:
    """A socket that listens at ``endpoint``, by `open_listener`, whose remarks become warnings."""
    opened = open_listener(endpoint, limit)
    for remark in opened.remarks:
        warn("%s", remark)
    return opened.listener


def open_listener(endpoint: Endpoint, limit: float) -> Opened:
    """Listen at ``endpoint``, on the interface that its host means, and on no other.

    Debian gives a machine's own name a loopback address: where tasks on other hosts are to come
    by such a name, the task listens on all interfaces. So it does behind a service name or a
    translated address, which no interface has. A name that nobody knows yet, as a new pod's, is
    asked for again until ``limit`` seconds are over.

    Raises `UnresolvedError`, and `TakenError` where no port of the endpoint is free.
    """
    family, means = _resolved(endpoint, limit)
    everywhere = endpoint.interface or ("::" if family == socket.AF_INET6 else "0.0.0.0")
    where = "on all interfaces" if not endpoint.interface else f"at {endpoint.interface}"
    remarks: list[str] = []
    foreign = not is_own(means)
    if foreign:
        remarks.append(
            f"{endpoint.host} is no address of this machine: {endpoint.name} listens {where}"
        )
    behind = endpoint.others and is_loopback(means) and not is_loopback(endpoint.host)
    if behind:
        remarks.append(f"{endpoint.host} means {means} here: {endpoint.name} listens {where}")
    try:
        listener = _bound_at_one(everywhere if foreign or behind else means, endpoint.ports)
    except OSError as error:
        raise _taken(endpoint, error) from error
    port = listener.getsockname()[1]
    drawn = endpoint.ports[-1] == DRAWN and endpoint.ports[0] not in (DRAWN, port)
    if drawn:
        remarks.append(
            f"port {endpoint.ports[0]} of {endpoint.name} is taken: it listens on {port} instead"
        )
    return Opened(listener, tuple(remarks), foreign, drawn)


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


def _resolved(endpoint: Endpoint, limit: float) -> tuple[int, str]:
    """The family and the number of the endpoint's host, once the name service knows it."""
    end, noted = time.monotonic() + limit, False
    while True:
        try:
            found = socket.getaddrinfo(endpoint.host, None, type=socket.SOCK_STREAM)[0]
            return found[0], str(found[4][0])
        except OSError as error:
            if time.monotonic() + RESOLVE_SECONDS >= end:
                raise UnresolvedError(
                    f"{endpoint.name} cannot resolve its own address {endpoint.host!r} within "
                    f"{limit:g} s: {error.strerror}",
                    "Give an address or a name that this machine knows.",
                ) from error
            if not noted:
                noted = True
                note("%s asks for its own name %s until it is known", endpoint.name, endpoint.host)
        time.sleep(RESOLVE_SECONDS)


def _taken(endpoint: Endpoint, error: OSError) -> TakenError:
    first, last = endpoint.ports[0], endpoint.ports[-1]
    if len(endpoint.ports) > 1 and last != DRAWN:
        return TakenError(
            f"{endpoint.name} cannot listen on {endpoint.host}: none of the ports "
            f"{min(endpoint.ports)}-{max(endpoint.ports)} is free",
            "End the programs that have them, or allow more: --ports, SPARTITO_PORTS.",
        )
    return TakenError(
        f"{endpoint.name} cannot listen on {endpoint.host}:{first}: {error.strerror}",
        "Another program has the port: choose a free one. Or this script made a second strategy "
        "while the first is open: give all trainers the same, Trainer(..., strategy=strategy).",
    )


def _bound_at_one(host: str, ports: Sequence[int]) -> socket.socket:
    """A socket that listens at ``host`` on the first of ``ports`` that is free."""
    for number, port in enumerate(ports):
        try:
            return _bound(host, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or number == len(ports) - 1:
                raise
    raise ValueError("an endpoint without ports")


def _bound(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if os.name == "posix":  # elsewhere it would let two programs have one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


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
