"""A job's store beside its launcher, which outlives every task."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from spartito.cluster.endpoints import port_range
from spartito.cluster.ports import free_port
from spartito.launch.roles import HOST
from spartito.names import ENV_STORE


@contextmanager
def kept_store(env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Keep a store for tasks of this machine; yields ``env`` with where it is.

    So any of them may be lost, also the one that would keep the store otherwise. A process of its
    own keeps it, as a launcher has one thread; it ends with us, however we end.
    """
    allowed = port_range(env)
    port = 0 if allowed is None else free_port(HOST, allowed)
    with socket.create_server((HOST, port)) as listener:
        where = f"{HOST}:{listener.getsockname()[1]}"
        command = [sys.executable, "-m", "spartito.cluster.store", str(listener.fileno())]
        keeper = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=dict(env),
            start_new_session=True,
        )
    try:
        yield {**env, ENV_STORE: where}
    finally:
        keeper.communicate()
