"""What this machine says about the network: names, routes, interfaces, who has a port."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from spartito.doctor.findings import Name, Route
from spartito.doctor.parallel import at_once
from spartito.system import PROC
from spartito.system.texts import text_of
from spartito.wire.interfaces import interface_of, resolve, source_address

LISTENS = "0A"
"""The state of a listening socket in the kernel's tables."""


def resolve_names(hosts: Iterable[str], end: float) -> list[Name]:
    """What each of ``hosts`` means here, asked at the same time."""
    asked = sorted(set(hosts))
    found = at_once(_resolve, asked, end)
    return [
        name or Name(host, error="no response from the name service")
        for host, name in zip(asked, found, strict=True)
    ]


def routes(names: Iterable[Name]) -> list[Route]:
    """How packets would leave for each host whose name resolves; nothing is sent."""
    found = []
    for name in names:
        source = source_address(name.addresses[0]) if name.addresses else ""
        if source:
            found.append(Route(name.host, interface_of(source), source))
    return found


def holder_of(port: int, proc: Path = PROC) -> str:
    """Which program listens on ``port``, as ``nginx (process 12)``; "" if unknown.

    The system tells it about our own processes, and to root about all.
    """
    inodes = set(_listening(port, proc))
    if not inodes:
        return ""
    sockets = {f"socket:[{inode}]" for inode in inodes}
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):
            for fd in (process / "fd").iterdir():
                if os.readlink(fd) in sockets:
                    return f"{(process / 'comm').read_text().strip()} (process {process.name})"
    return ""


def _resolve(host: str) -> Name:
    try:
        return Name(host, resolve(host))
    except (OSError, UnicodeError) as error:
        return Name(host, error=str(getattr(error, "strerror", None) or error))


def _listening(port: int, proc: Path) -> Iterable[str]:
    for table in ("net/tcp", "net/tcp6"):
        for line in text_of(proc / table).splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9]
