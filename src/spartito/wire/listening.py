"""A socket that listens where a task is expected, and on no other interface."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spartito.errors import UserError
from spartito.notes import note, warn
from spartito.wire.addresses import DRAWN, Endpoint, is_loopback
from spartito.wire.limits import BACKLOG, RESOLVE_SECONDS
from spartito.wire.ports import is_own
from spartito.wire.streams import Socket

EVERYWHERE = "0.0.0.0"
"""All interfaces."""


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

    listener: Socket
    remarks: tuple[str, ...] = ()
    foreign: bool = False
    drawn: bool = False

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.listener.getsockname()[1])


def listen(endpoint: Endpoint, limit: float) -> Socket:
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
    everywhere = endpoint.interface or ("::" if family == socket.AF_INET6 else EVERYWHERE)
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
    what = f"{endpoint.name} cannot listen on {endpoint.host}:{first}: {error.strerror}"
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return TakenError(
            what,
            "This script's own torch.distributed.init_process_group() may have the port: leave it "
            "out, as the strategy joins the job, and sum by strategy.reduce.",
        )
    return TakenError(
        what,
        "Another program has the port: choose a free one. Or this script made a second strategy "
        "while the first is open: give all trainers the same, Trainer(..., strategy=strategy).",
    )


def _bound_at_one(host: str, ports: Sequence[int]) -> Socket:
    """A socket that listens at ``host`` on the first of ``ports`` that is free."""
    for number, port in enumerate(ports):
        try:
            return bound(host, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or number == len(ports) - 1:
                raise
    raise ValueError("an endpoint without ports")


def bound(host: str, port: int) -> Socket:
    """A socket that listens at an address of this machine, "" for all of IPv4."""
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


def listen_here(path: Path, backlog: int = 1) -> Socket:
    """A socket at ``path``, a new file, for processes of this machine and user alone."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(listener.fileno(), 0o600)  # which what bind makes has too, under any umask
        listener.bind(str(path))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener
