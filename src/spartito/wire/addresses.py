"""Addresses as text, and where a task listens; nothing here asks the system."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

from spartito.errors import UserError

DRAWN = 0
"""The port that stands for any that the system draws."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the task ``name`` listens: ``host`` is what the others are told.

    ``ports`` are tried in order. ``others``: tasks on other hosts come, so that a name which
    means the loopback here will not do. ``interface`` is the address to listen at where ``host``
    is none of this machine; "" stands for all interfaces.
    """

    name: str
    host: str
    ports: tuple[int, ...]
    others: bool = True
    interface: str = ""

    @property
    def is_fixed(self) -> bool:
        """Whether only one port will do, as the others know it already."""
        return len(self.ports) == 1 and self.ports[0] != DRAWN


def address(host: str, port: int) -> str:
    """``host:port``, an IPv6 host in brackets; `UserError` where these cannot be an address."""
    bare = ":" in host and not host.startswith("[")
    whole = f"[{host}]:{port}" if bare else f"{host}:{port}"
    split_address(whole)
    return whole


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of ``host:port`` or ``[ipv6]:port``; `UserError` if it is neither."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    if not colon or not name or (":" in name) != bracketed or not _is_host(name):
        raise UserError(
            f"the address {address!r} is not host:port",
            "Write it as 10.0.0.1:29500, name:29500 or [fe80::1]:29500.",
        )
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UserError(f"the port {port!r} of {address!r} is not a number from 1 to 65535")
    return name, int(port)


def canonical(host: str) -> str:
    """One spelling for each host: ``localhost`` for all that mean 127.0.0.1 or all interfaces."""
    name = host.lower().removesuffix(".")
    with suppress(ValueError):
        name = str(ip_address(name))
    return "localhost" if name in {"127.0.0.1", "::1", "0.0.0.0", "::"} else name


def machine_of(host: str) -> str:
    """One name for all that mean one machine, as far as ``host`` tells: loopbacks are one."""
    return "localhost" if is_loopback(host) else canonical(host)


def is_loopback(host: str) -> bool:
    """Whether ``host`` means each machine itself, so that no other machine can reach it."""
    name = canonical(host)
    return name == "localhost" or name.startswith("127.")


def _is_host(name: str) -> bool:
    labels = name.removesuffix(".").split(".")  # as names are looked up
    odd = any(c.isspace() or c in "/@[]" for c in name)
    return not odd and all(0 < len(label) < 64 for label in labels)
