"""A job's store beside its launcher, which outlives every task."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from spartito.cluster.endpoints import port_range
from spartito.errors import UserError
from spartito.launch.roles import HOST
from spartito.names import ENV_STORE
from spartito.wire.addresses import DRAWN, address, is_loopback
from spartito.wire.ports import is_own
from spartito.wire.secret import read_secret, without_secret


@contextmanager
def kept_store(
    env: Mapping[str, str], host: str = HOST, port: int = DRAWN
) -> Iterator[dict[str, str]]:
    """Keep a store for a job's tasks; yields ``env`` with where it is.

    They reach this machine as ``host``; by default they are on it. The store listens at ``port``,
    or at another one if that is taken, of those that are allowed.

    So any of them may be lost, also the one that would keep the store otherwise. A process of its
    own keeps it, as a launcher has one thread; it ends with us, however we end.
    """
    allowed = port_range(env)
    ports = tuple(allowed)[::-1] if allowed else (port, DRAWN) if port else (DRAWN,)
    with _listener(host, ports) as listener:
        where = address(host, listener.getsockname()[1])
        command = [sys.executable, "-m", "spartito.cluster.store", host]
        keeper = subprocess.Popen(
            [*command, str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=without_secret(env),
            text=True,
            start_new_session=True,
        )
    assert keeper.stdin is not None
    keeper.stdin.write(read_secret(env) + "\n")
    keeper.stdin.flush()
    try:
        yield {**env, ENV_STORE: where}
    finally:
        keeper.communicate()


def _listener(host: str, ports: Sequence[int]) -> socket.socket:
    """A socket at the first free one of ``ports``, where ``host`` is, else on all interfaces."""
    means = ""
    with suppress(OSError):
        means = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    is_here = means and is_own(means) and (is_loopback(host) or not is_loopback(means))
    family = socket.AF_INET6 if ":" in means else socket.AF_INET
    for port in ports:
        with suppress(OSError):
            return socket.create_server((means if is_here else "", port), family=family)
    raise UserError(
        f"the job's store cannot listen at {host}: none of the ports {min(ports)}-{max(ports)} is "
        "free",
        "End the programs that have them, or allow more: --ports, SPARTITO_PORTS.",
    )
