"""How the processes of a job find each other: one store at the rendezvous, then a collective."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from spartito.cluster.endpoints import (
    check_drawn,
    chosen_interface,
    group_endpoint,
    peer_endpoint,
    rendezvous_endpoint,
)
from spartito.cluster.interfaces import interface_of
from spartito.cluster.limits import time_limit
from spartito.cluster.secret import job_key
from spartito.cluster.spec import ClusterSpec, split_address
from spartito.collectives.collective import Collective, IdentityCollective
from spartito.collectives.hierarchical import HierarchicalCollective, Inside
from spartito.collectives.peers import check_connections
from spartito.collectives.placement import PROCESS_GROUP, Placement
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.collectives.shared_memory import SharedMemoryCollective, host_key, supported
from spartito.collectives.sockets import RETRY_SECONDS, dial, listen
from spartito.collectives.store import ask, missing_tasks
from spartito.collectives.tcp import SocketCollective
from spartito.collectives.versions import Versions, check_versions
from spartito.errors import TaskLostError, UserError
from spartito.names import nearest

COMMUNICATION = ("auto", "ddp", "process_group", "sockets")
_meetings = 0  # of this process so far
FAREWELL = 10.0  # seconds that the keeper of the store stays for those who are refused with it


class Arrival(msgspec.Struct, frozen=True):
    """What each replica tells all when it comes; equal texts ``host`` share memory."""

    host: str
    versions: Versions


def connect(
    cluster: ClusterSpec,
    device: torch.device,
    timeout: float | None = None,
    communication: str = "auto",
    host: str | None = None,
) -> Collective:
    """The fastest collective that all replicas of ``cluster`` can share; all call this together.

    Alone: the identity. On CPUs of one machine: shared memory; of several machines: sockets, and
    shared memory inside a machine with several replicas. "sockets" leaves shared memory out.
    "process_group" and "ddp" are gloo on CPUs; GPUs have NCCL. Processes with equal texts
    ``host`` share memory; None finds out.
    Raises `TaskLostError` that names the replicas which did not come within ``timeout`` seconds,
    and on all of them `UserError` if their versions of Spartito or torch do not fit together.
    """
    check_communication(communication, device)
    limit = time_limit(timeout)
    if cluster.world_size == 1:
        return IdentityCollective()
    group = device.type != "cpu" or communication in PROCESS_GROUP
    if group:
        check_drawn()
    names = [cluster.name_of(rank) for rank in range(cluster.world_size)]
    store = _meet(cluster, names, limit)
    here = (host or host_key()) if supported() else f"rank {cluster.rank}"
    came = ask(lambda: _tell_all(store, cluster, here), limit, names[0])
    _check_versions(came, cluster.rank, names, store)
    placement = Placement.of([arrival.host for arrival in came])
    share = not group and communication == "auto"
    if share and len(placement.machines) == 1:
        return SharedMemoryCollective(cluster.rank, names, store, limit)
    if share and placement.is_layered:
        return _hierarchical(cluster, names, store, limit, placement)
    if not group:
        where, key = peer_endpoint(cluster), job_key(cluster)
        return SocketCollective(cluster.rank, names, store, limit, where, key)
    endpoint = group_endpoint(cluster)
    if device.type == "cuda":
        if interface := chosen_interface():
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface_of(interface))
        return ProcessGroupCollective(cluster.rank, names, store, limit, "nccl", endpoint.host)
    ways = dist.PrefixStore("ways", store)
    check_connections(cluster.rank, names, ways, limit, endpoint, job_key(cluster))
    return ProcessGroupCollective(cluster.rank, names, store, limit, "gloo", endpoint.host)


def check_communication(communication: str, device: torch.device) -> None:
    """Raise `UserError` for a way that does not exist, or not on that device."""
    if communication not in COMMUNICATION:
        raise UserError(
            f"unknown communication {communication!r}", nearest(communication, COMMUNICATION)
        )
    if communication == "sockets" and device.type != "cpu":
        raise UserError(f"communication='sockets' on {device}", "Sockets are for CPUs: take auto.")


def _hierarchical(
    cluster: ClusterSpec, names: list[str], store: dist.Store, limit: float, placement: Placement
) -> Collective:
    """Shared memory among the replicas of this machine, sockets among the leaders."""
    rank = cluster.rank
    machine, members = placement.machine_of(rank), placement.members(rank)
    inside: Inside = IdentityCollective()
    if len(members) > 1:
        own = dist.PrefixStore(f"machine/{machine}", store)
        neighbours = [names[member] for member in members]
        place = members.index(rank)
        inside = SharedMemoryCollective(place, neighbours, own, limit, keeper=names[0])

    def meet_leaders() -> Collective:
        leaders = [names[leader] for leader in placement.leaders]
        where, key = peer_endpoint(cluster), job_key(cluster)
        return SocketCollective(machine, leaders, store, limit, where, key)

    return HierarchicalCollective(rank, names, placement, inside, meet_leaders)


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
    global _meetings
    _meetings += 1
    # The agent's store keeps what was said in earlier meetings of the same processes.
    prefix = f"spartito/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_meetings * agent}"
    if serves:
        listener = listen(rendezvous_endpoint(cluster), limit).detach()
    else:
        listener = None
    while True:
        if not serves:
            dial(host, port, names[0], limit).close()  # torch's store would wait, but noisily
        try:
            job = ask(
                lambda: _place(host, port, limit, listener, prefix, cluster.rank), limit, names[0]
            )
        except TaskLostError:
            if serves or _meetings == 1 or time.monotonic() > end:
                raise
            job = None
        if job is not None:
            break
        if serves or time.monotonic() > end:
            raise TaskLostError(
                f"another process has come to {host}:{port} as {names[cluster.rank]}",
                "Each task is one process: give this one a rank or an address of its own.",
            )
        time.sleep(RETRY_SECONDS)
    left = max(0.0, end - time.monotonic())
    absent = missing_tasks(dist.PrefixStore("came", job), cluster.rank, names, left)
    if absent:
        raise TaskLostError(
            f"{' and '.join(absent)} did not come to {host}:{port} within {limit:g} s",
            "Start it, or mend the address; SPARTITO_TIMEOUT sets the limit in seconds.",
        )
    return job


def _place(
    host: str, port: int, limit: float, listener: int | None, prefix: str, rank: int
) -> dist.Store | None:
    """Our place at the job's store; None where a process came as ``rank`` before.

    That may have been this one: the store of a meeting that is over goes a moment later.
    """
    job = dist.PrefixStore(prefix, _store(host, port, limit, listener))
    return job if job.add(f"place/{rank}", 1) == 1 else None


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


def _tell_all(store: dist.Store, cluster: ClusterSpec, host: str) -> list[Arrival]:
    """What all replicas tell, by rank."""
    own = Arrival(host, Versions.own())
    store.set(f"came as/{cluster.rank}", msgspec.json.encode(own).decode())
    told = [store.get(f"came as/{rank}") for rank in range(cluster.world_size)]
    return [msgspec.json.decode(text, type=Arrival) for text in told]


def _check_versions(
    came: Sequence[Arrival], rank: int, names: Sequence[str], store: dist.Store
) -> None:
    """Raise on all replicas if their versions do not fit together."""
    try:
        check_versions({name: one.versions for name, one in zip(names, came, strict=True)})
    except UserError:
        # The store goes with its keeper: that one leaves when all have read it.
        missing_tasks(dist.PrefixStore("refused", store), rank, names, FAREWELL)
        raise
