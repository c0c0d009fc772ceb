"""TCP ports of this machine that are free."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice

from spartito.errors import UserError

BELOW_EPHEMERAL = range(20000, 29500)
"""Ports that no system gives to outgoing connections, so that a free one stays free.

From 29500 on, torchrun's default, are those at which jobs meet.
"""


def free_port(host: str = "127.0.0.1", allowed: Sequence[int] | None = None) -> int:
    """A TCP port of ``host``, an address of this machine, where nobody listens now."""
    return free_ports(1, host, allowed)[0]


def free_ports(
    count: int, host: str = "127.0.0.1", allowed: Sequence[int] | None = None
) -> list[int]:
    """``count`` different TCP ports of ``host`` where nobody listens now.

    The first ones of ``allowed``, if that is given; `UserError` where too few of them are free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if allowed is not None:
        found = list(islice((port for port in allowed if _is_free(family, host, port)), count))
        if len(found) < count:
            raise UserError(
                f"{len(found)} of the ports {min(allowed)}-{max(allowed)} are free on {host}, but "
                f"{count} are needed",
                "Allow more ports: --ports, SPARTITO_PORTS.",
            )
        return found
    tried = random.sample(BELOW_EPHEMERAL, min(len(BELOW_EPHEMERAL), 50 * count))
    ports = list(islice((port for port in tried if _is_free(family, host, port)), count))
    with ExitStack() as held:  # all at once, so that they differ
        for _ in range(count - len(ports)):
            probe = held.enter_context(socket.socket(family))
            probe.bind((host, 0))
            ports.append(int(probe.getsockname()[1]))
    return ports


def is_own(host: str) -> bool:
    """Whether an interface of this machine has the address ``host``."""
    return _is_free(socket.AF_INET6 if ":" in host else socket.AF_INET, host, 0)


def _is_free(family: socket.AddressFamily, host: str, port: int) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
