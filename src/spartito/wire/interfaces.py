"""The network interfaces of this machine, their addresses, and which of them a route takes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from spartito.system import ipv4_of, ipv6_addresses
from spartito.wire.addresses import is_loopback
from spartito.wire.ports import is_own

ELSEWHERE = "192.0.2.1"
"""An address for documentation: the default route goes there."""


def address_of(interface: str) -> str:
    """The IPv4 address of ``interface``, else its IPv6 address that is not link-local, else ""."""
    if found := ipv4_of(interface):
        return found
    for address, on_its_link, name in ipv6_addresses():
        if name == interface and not on_its_link:
            return address
    return ""


def interface_of(address: str) -> str:
    """The interface that has ``address``, "" where that cannot be told."""
    if address.startswith("127."):
        address = "127.0.0.1"
    if ":" in address:
        wanted = address.partition("%")[0]
        return next((name for known, _, name in ipv6_addresses() if known == wanted), "")
    with suppress(OSError):
        for _, name in socket.if_nameindex():
            if ipv4_of(name) == address:
                return name
    return ""


def own_name() -> str:
    """What this machine calls itself."""
    return socket.gethostname()


def own_addresses() -> dict[str, str]:
    """The address of each interface that has one."""
    found = {name: address_of(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address}


def resolve(name: str) -> list[str]:
    """What this machine takes ``name`` for, as numbers; `OSError` where it does not know it."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def addresses_of(name: str) -> list[str]:
    """As `resolve`; empty where this machine does not know the name."""
    try:
        return resolve(name)
    except (socket.gaierror, UnicodeError):
        return []


def is_here(host: str) -> bool:
    """Whether ``host``, a name or a number, belongs to this machine."""
    return any(map(is_own, addresses_of(host)))


def own_address(host: str, port: int, others: Sequence[str] = ()) -> str:
    """The address of this machine that routes to ``host``: the interface the others can reach.

    Debian gives a machine's own name a loopback address. If ``host`` is such a name, it is the
    way to the first of the hosts ``others`` that is elsewhere, else the way to anywhere.
    """
    found = _source(host, port)
    if is_loopback(found) and not is_loopback(host):
        for other in (*others, ELSEWHERE):
            # Without any route all are on this machine.
            if (way := source_address(other, port)) and not is_loopback(way):
                return way
    return found


def source_address(host: str, port: int = 9) -> str:
    """The address of this machine on the way to ``host``, "" where there is no way."""
    try:
        return _source(host, port)
    except OSError:
        return ""


def _source(host: str, port: int) -> str:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # a datagram socket sends nothing: it only picks a route
        return str(probe.getsockname()[0])
