"""The machines of a job by their names: who they are, and which of them is this one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from spartito.cluster import nodelist
from spartito.errors import UserError
from spartito.wire.addresses import canonical, is_loopback

NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.$-]*")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: as it was typed (``me@a``), how the others reach it, and whether it is ours."""

    name: str
    address: str
    here: bool = False


def parse_hosts(text: str) -> tuple[str, ...]:
    """The machines of ``a,me@b,node[01-03]`` in their order, as they were typed.

    Raises `UserError` for a list that does not parse, a machine that is named twice, and a
    loopback name among several, which would be each machine itself.
    """
    names = nodelist.expand(text)
    seen: set[str] = set()
    for name in names:
        user, at, bare = name.rpartition("@")
        if not is_name(bare) or (at and not USER.fullmatch(user)):
            raise UserError(
                f"--hosts {text}: {name!r} is no name of a machine",
                "Write a,b,c or me@a,me@b; ports and keys belong to ssh's own config.",
            )
        check_reachable(text, bare, len(names))
        if canonical(bare) in seen:
            raise UserError(f"--hosts {text} names {bare} twice", "Name each machine once.")
        seen.add(canonical(bare))
    return names


def check_reachable(text: str, address: str, count: int) -> None:
    """Raise `UserError` where ``address``, of ``count`` machines in ``text``, is loopback."""
    if count > 1 and is_loopback(address):
        raise UserError(
            f"--hosts {text}: {address} is each machine itself",
            "Give the name or address by which the other machines reach it.",
        )


def check_names(hosts: Sequence[Host], knows: Sequence[dict[str, list[str]]]) -> None:
    """Raise `UserError` where a machine would look for another one in vain.

    ``knows`` says for each of ``hosts`` what it takes the names of those for that listen.
    """
    everywhere = {name: [n for known in knows for n in known.get(name, [])] for name in knows[0]}
    for host, known in zip(hosts, knows, strict=True):
        for name, numbers in known.items():
            if not numbers:
                raise UserError(
                    f"{host.name} does not know the name {name}",
                    "Add it to DNS or to /etc/hosts there, or give its address in --hosts.",
                )
            # A machine whose own name is one listens on all interfaces.
            if all(map(is_loopback, numbers)) and name != host.address:
                number = next((n for n in everywhere[name] if not is_loopback(n)), "its address")
                raise UserError(
                    f"on {host.name} the name {name} means {numbers[0]}, the machine itself: "
                    "others would wait for it in vain",
                    f"Write {number} instead of {name} in --hosts.",
                )


def is_name(text: str) -> bool:
    """Whether ``text`` can be a machine: a name, or an address of IPv4 or IPv6."""
    try:
        ip_address(text)
    except ValueError:
        return NAME.fullmatch(text) is not None
    return True
