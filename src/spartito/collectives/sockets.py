"""Sockets between tasks: one to listen on its own address only, one to a task that may be late."""

from __future__ import annotations

import errno
import socket
import time

from spartito.cluster.spec import is_loopback
from spartito.collectives.waiting import Waiting
from spartito.errors import TaskLostError, UserError
from spartito.log import warn

RETRY_SECONDS = 0.02  # between two looks for a task that does not listen yet
BACKLOG = 1024


def listen(
    host: str, port: int, name: str, *, anywhere: bool, others: bool = True
) -> socket.socket:
    """A socket on which task ``name`` listens at ``host:port``, on that interface alone.

    Debian gives a machine's own name a loopback address. Where ``others``, on other hosts, are
    to come by such a name, the task listens on all interfaces, and warns.

    Behind a service name or a translated address no interface of this machine has the address:
    with ``anywhere`` it then listens on all of them and warns; else that is a `UserError`, as
    are a host that cannot be resolved and a port that is taken.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError(
            f"{name} cannot resolve its own address {host!r}: {error.strerror}",
            "Give an address or a name that this machine knows.",
        ) from error
    means = str(address[0])
    everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
    if others and is_loopback(means) and not is_loopback(host):
        warn("%s means %s here: %s listens on all interfaces", host, means, name)
        return listen(everywhere, port, name, anywhere=False)
    try:
        return _bound(family, kind, address)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL and anywhere:
            warn("%s is no address of this machine: %s listens on all of them", host, name)
            return listen(everywhere, port, name, anywhere=False)
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError(
                f"{name} cannot listen on {host}:{port}: {host} is no address of this machine",
                "Start it on the machine that has the address, or mend the address.",
            ) from error
        raise UserError(
            f"{name} cannot listen on {host}:{port}: {error.strerror}",
            "Another program has the port; choose a free one.",
        ) from error


def dial(host: str, port: int, name: str, limit: float) -> socket.socket:
    """A blocking connection to task ``name``, once it listens at ``host:port``; no Nagle delay.

    Raises `TaskLostError` that names the task if it does not within ``limit`` seconds.
    """
    start = time.monotonic()
    end = start + limit
    waiting = Waiting(0, [f"{name} at {host}:{port}"])
    while True:
        try:
            until = min(end, start + waiting.after)
            return _connected(host, port, max(0.01, until - time.monotonic()))
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS >= end:
                raise TaskLostError(
                    f"{name} did not come to {host}:{port} within {limit:g} s",
                    f"{error.strerror or error}. Start it, or mend the address; "
                    "SPARTITO_TIMEOUT sets the limit in seconds.",
                ) from error
        waiting.look(time.monotonic() - start, [0], limit)
        time.sleep(RETRY_SECONDS)


def _bound(family: int, kind: int, address: object) -> socket.socket:
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)  # type: ignore[arg-type]
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
