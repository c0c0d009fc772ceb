"""A job's store beside its launcher, which outlives every task."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from spartito.cluster.endpoints import port_range
from spartito.launch.processes.roles import HOST
from spartito.names import ENV_STORE
from spartito.wire.addresses import DRAWN, Endpoint, address
from spartito.wire.listening import EVERYWHERE, UnresolvedError, open_listener
from spartito.wire.secret import read_secret, without_secret
from spartito.wire.streams import Socket


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


def _listener(host: str, ports: Sequence[int]) -> Socket:
    """A socket at the first free one of ``ports``, where ``host`` is, else on all interfaces."""
    endpoint = Endpoint("the job's store", host, tuple(ports))
    try:
        return open_listener(endpoint, 0.0).listener
    except UnresolvedError:  # the others may know the name, and come by any interface
        return open_listener(replace(endpoint, host=EVERYWHERE), 0.0).listener
