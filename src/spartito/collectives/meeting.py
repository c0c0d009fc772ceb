"""Where the tasks of a job come first: the store, and who keeps it."""

from __future__ import annotations

import os
import socket
import time
import weakref
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from spartito.cluster.endpoints import rendezvous_endpoint
from spartito.cluster.secret import read_secret
from spartito.cluster.spec import ClusterSpec, split_address
from spartito.cluster.store.client import Store
from spartito.cluster.store.server import Server
from spartito.collectives.sockets import RETRY_SECONDS, dial, listen
from spartito.collectives.store import KeyValues, Membership, ask, quiet_torch
from spartito.collectives.torch_store import OfTorch
from spartito.errors import TaskLostError

_visits = 0  # of this process to a store so far


class Kept:
    """A store that this process keeps as long as somebody holds this."""

    def __init__(self, server: Server) -> None:
        self.server = server
        weakref.finalize(self, server.close).atexit = False


def meet(cluster: ClusterSpec, names: list[str], limit: float) -> KeyValues:
    """The job's store, once every replica is there.

    Raises:
        TaskLostError: Names those who do not come within ``limit`` seconds.
        UserError: What keeps the store is another program, or has another secret.
    """
    host, port = split_address(cluster.rendezvous or "")
    # torchrun's agent keeps a store at this address already, over restarts of the workers too.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = cluster.rank == 0 and not agent
    end = time.monotonic() + limit
    global _visits
    _visits += 1
    # The agent's store keeps the keys of earlier visits of the same processes.
    prefix = f"spartito/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_visits * agent}"
    store: KeyValues | None = kept_here(cluster, names[0], limit) if serves else None
    while True:
        if store is None:
            dial(host, port, names[0], limit, end).close()
            store = _of_agent(host, port, limit) if agent else _at(host, port, names[0], limit)
        job = store.under(prefix)
        try:
            count = ask(partial(job.add, f"rank/{cluster.rank}", 1), limit, names[0])
        except TaskLostError:
            if serves or _visits == 1 or time.monotonic() > end:
                raise
            count = 0
        if count == 1:
            break
        # That may have been this one: the store of an earlier job goes a moment later.
        if serves or time.monotonic() > end:
            raise TaskLostError(
                f"another process has come to {host}:{port} as {names[cluster.rank]}",
                "Each task is one process: give this one a rank or an address of its own.",
            )
        store = None
        time.sleep(RETRY_SECONDS)
    left = max(0.0, end - time.monotonic())
    if missing := Membership(cluster.rank, names, job, limit).under("came").missing(left):
        raise TaskLostError(
            f"{' and '.join(missing)} did not come to {host}:{port} within {limit:g} s",
            "Start it, or correct the address; SPARTITO_TIMEOUT sets the limit in seconds.",
        )
    return job


def kept_here(cluster: ClusterSpec, name: str, limit: float) -> Store:
    """A store in this process, at the job's rendezvous; it ends with the last who holds it."""
    listener = listen(rendezvous_endpoint(cluster), limit)
    kept = Kept(Server(listener, read_secret().encode(), name))
    host, port = kept.server.address
    return _at(host, port, name, limit, kept)


def _at(host: str, port: int, name: str, limit: float, keeps: object = None) -> Store:
    """The store at an address where it is kept already."""

    def connect(seconds: float) -> socket.socket:
        return socket.create_connection((host, port), seconds)

    return Store(connect, read_secret().encode(), limit, f"{name} at {host}:{port}", keeps)


def _of_agent(host: str, port: int, limit: float) -> OfTorch:
    """The store that torchrun keeps."""
    quiet_torch()
    seconds = timedelta(seconds=limit)
    made = ask(
        lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=seconds),
        limit,
        f"torchrun at {host}:{port}",
    )
    return OfTorch(made)
