"""How the processes of a job find each other: one store at the rendezvous, then a collective."""

from __future__ import annotations

import errno
import os
import socket
import time
from datetime import timedelta
from math import inf

import torch
import torch.distributed as dist

from spartito.cluster.spec import ClusterSpec, split_address
from spartito.collectives.collective import Collective, IdentityCollective
from spartito.collectives.process_group import ProcessGroupCollective, own_address
from spartito.collectives.shared_memory import SharedMemoryCollective, host_key, supported
from spartito.collectives.store import absentees, ask
from spartito.errors import TaskLostError, UserError
from spartito.log import warn
from spartito.names import ENV_TIMEOUT, nearest

RETRY_SECONDS = 0.02  # between two looks for a rank 0 that does not listen yet
COMMUNICATION = ("auto", "ddp", "process_group")


def connect(
    cluster: ClusterSpec,
    device: torch.device,
    timeout: float | None = None,
    communication: str = "auto",
) -> Collective:
    """The fastest collective that all replicas of ``cluster`` can share; all call this together.

    Alone: the identity. On one machine and CPU: shared memory. Else, or if ``communication``
    is another than "auto": gloo, for GPUs NCCL.
    Raises `TaskLostError` that names the replicas which did not come within ``timeout`` seconds.
    """
    if communication not in COMMUNICATION:
        raise UserError(
            f"unknown communication {communication!r}", nearest(communication, COMMUNICATION)
        )
    limit = time_limit() if timeout is None else _checked(timeout)
    if cluster.num_replicas == 1:
        return IdentityCollective()
    names = [cluster.name_of(rank) for rank in range(cluster.num_replicas)]
    store = _meet(cluster, names, limit)
    host = host_key() if supported() else f"rank {cluster.rank}"
    hosts = ask(lambda: _tell_all(store, cluster, host), limit, names[0])
    if device.type == "cpu" and len(set(hosts)) == 1 and communication == "auto":
        return SharedMemoryCollective(cluster.rank, names, store, limit)
    backend = "nccl" if device.type == "cuda" else "gloo"
    address = own_address(*_rendezvous(cluster))
    return ProcessGroupCollective(cluster.rank, names, store, limit, backend, address)


def time_limit() -> float:
    """Seconds that a wait for another task may take: ``SPARTITO_TIMEOUT``, else 300."""
    text = os.environ.get(ENV_TIMEOUT, "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < inf:
        raise UserError(f"{ENV_TIMEOUT}={text!r} is not a number of seconds above 0")
    return seconds


def _checked(timeout: float) -> float:
    """``timeout`` if it can be one: options come from JSON, where anything may stand."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < inf:
        raise UserError(f"timeout={timeout!r} is not a number of seconds above 0")
    return timeout


def _rendezvous(cluster: ClusterSpec) -> tuple[str, int]:
    assert cluster.rendezvous is not None  # ClusterSpec holds this for several replicas
    return split_address(cluster.rendezvous)


def _meet(cluster: ClusterSpec, names: list[str], limit: float) -> dist.Store:
    """The job's store, once every replica is there."""
    host, port = _rendezvous(cluster)
    # torchrun's agent keeps a store at this address already, over restarts of the workers too.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = cluster.rank == 0 and not agent
    end = time.monotonic() + limit
    if serves:
        listener = _listen(host, port, names[0]).detach()
    else:
        listener = None
        _await(host, port, names[0], limit)
    store = ask(lambda: _store(host, port, limit, listener), limit, names[0])
    job = dist.PrefixStore(f"spartito/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    left = max(0.0, end - time.monotonic())
    absent = absentees(dist.PrefixStore("came", job), cluster.rank, names, left)
    if absent:
        raise TaskLostError(
            f"{' and '.join(absent)} did not come to {host}:{port} within {limit:g} s",
            "Start it, or mend the address; SPARTITO_TIMEOUT sets the limit in seconds.",
        )
    return job


def _store(host: str, port: int, limit: float, listener: int | None) -> dist.TCPStore:
    """Our end of the job's store, which is kept here if ``listener`` is its socket."""
    return dist.TCPStore(
        host,
        port,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=limit),
        master_listen_fd=listener,
    )


def _await(host: str, port: int, name: str, limit: float) -> None:
    """Return when ``name`` listens at ``host:port``; torch's store would wait, but noisily."""
    end = time.monotonic() + limit
    while True:
        try:
            with socket.create_connection((host, port), max(0.01, end - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS >= end:
                raise TaskLostError(
                    f"{name} did not come to {host}:{port} within {limit:g} s",
                    f"{error.strerror or error}. Start it, or mend the address; "
                    "SPARTITO_TIMEOUT sets the limit in seconds.",
                ) from error
        time.sleep(RETRY_SECONDS)


def _tell_all(store: dist.Store, cluster: ClusterSpec, text: str) -> list[str]:
    store.set(f"host/{cluster.rank}", text)
    return [store.get(f"host/{rank}").decode() for rank in range(cluster.num_replicas)]


def _listen(host: str, port: int, name: str) -> socket.socket:
    """A socket on the rendezvous' own interface; torch's store would listen on all of them."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError(
            f"{name} cannot resolve its own address {host!r}: {error.strerror}",
            "Give an address or a name that this machine knows.",
        ) from error
    try:
        return _bound(family, kind, address)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            # Behind a service name or a translated address: no interface of ours has it.
            warn("%s is no address of this machine: the job's store listens on all of them", host)
            return _bound(family, kind, ("", port))
        raise UserError(
            f"{name} cannot listen on {host}:{port}: {error.strerror}",
            "Another program has the port; choose a free one.",
        ) from error


def _bound(family: int, kind: int, address: object) -> socket.socket:
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener
