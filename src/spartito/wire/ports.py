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


def free_port(
    host: str = "127.0.0.1",
    allowed: Sequence[int] | None = None,
    held: ExitStack | None = None,
) -> int:
    """A TCP port of ``host``, an address of this machine, where nobody listens now.

    As `free_ports`.
    """
    return free_ports(1, host, allowed, held)[0]


def drawn(ports: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of ``ports`` in any order: others in each process, also after a seed."""
    return random.SystemRandom().sample(ports, min(count, len(ports)))


def free_ports(
    count: int,
    host: str = "127.0.0.1",
    allowed: Sequence[int] | None = None,
    held: ExitStack | None = None,
) -> list[int]:
    """``count`` different TCP ports of ``host`` where nobody listens now.

    The first ones of ``allowed``, if that is given; `UserError` where too few of them are free.
    Until ``held`` closes nobody else finds them free; our tasks can listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if allowed is not None:
        free = (port for port in allowed if _is_free(family, host, port, held))
        found = list(islice(free, count))
        if len(found) < count:
            raise UserError(
                f"{len(found)} of the ports {min(allowed)}-{max(allowed)} are free on {host}, but "
                f"{count} are needed",
                "Allow more ports: --ports, SPARTITO_PORTS.",
            )
        return found
    tried = drawn(BELOW_EPHEMERAL, 50 * count)
    ports = list(islice((port for port in tried if _is_free(family, host, port, held)), count))
    with ExitStack() as probes:  # all at once, so that they differ
        for _ in range(count - len(ports)):
            probe = probes.enter_context(socket.socket(family))
            probe.bind((host, 0))
            ports.append(int(probe.getsockname()[1]))
    return ports


def is_own(host: str) -> bool:
    """Whether an interface of this machine has the address ``host``."""
    return _is_free(socket.AF_INET6 if ":" in host else socket.AF_INET, host, 0)


def _is_free(
    family: socket.AddressFamily, host: str, port: int, held: ExitStack | None = None
) -> bool:
    """Whether the port can be had; it stays bound until ``held`` closes."""
    probe = socket.socket(family)
    try:
        probe.bind((host, port))
    except OSError:
        probe.close()
        return False
    if held is None:
        probe.close()
    else:  # bound alone, and from now on beside who listens there
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.enter_context(probe)
    return True
