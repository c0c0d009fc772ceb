"""How the ranks of a new group find each other, and what connects them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch.distributed as dist

from spartito.backend.errors import LostRankError
from spartito.backend.layers import TwoLayers
from spartito.backend.machine import OneMachine
from spartito.backend.machines import SeveralMachines
from spartito.backend.operations import Alone, Operations
from spartito.backend.wire import Wire
from spartito.cluster.endpoints import chosen_interface, port_range
from spartito.collectives.membership.placement import Placement
from spartito.collectives.membership.rendezvous import FAREWELL, TaskInfo
from spartito.collectives.membership.store import Membership
from spartito.collectives.membership.torch_store import OfTorch
from spartito.collectives.membership.versions import Versions, check_versions
from spartito.collectives.memory.shared_memory import Cores
from spartito.errors import RefusedCallError, UserError
from spartito.names import ENV_INTERFACE
from spartito.system import host_key, shares_memory
from spartito.system.capacity import cgroup_quota
from spartito.wire.addresses import DRAWN, Endpoint, is_loopback
from spartito.wire.interfaces import ELSEWHERE, own_address
from spartito.wire.secret import check_secrets, fingerprint, key_among, read_secret


def operations_of(options: Any) -> Operations:
    """The operations of the group that torch's ``options`` describe."""
    size: int = options.group_size
    if size == 1:
        return Alone()
    ranks: Sequence[int] = options.global_ranks_in_group or range(size)
    group = Membership(
        options.group_rank,
        [f"rank {rank}" for rank in ranks],
        OfTorch(options.store),
        options.timeout.total_seconds(),
        "rank 0",
    )
    tasks = _met(group)
    named = dict(zip(group.names, tasks, strict=True))
    try:
        check_versions({name: task.versions for name, task in named.items()})
        check_secrets({name: task.secret for name, task in named.items()})
    except UserError:
        # The store goes with its keeper: that one leaves when all have read it.
        group.under("refused").sign_in(FAREWELL)
        raise
    placement = Placement.of([task.host for task in tasks])
    own, here = tasks[group.rank], placement.members(group.rank)
    spins = own.cores.suffice([tasks[rank].cores for rank in here], cgroup_quota())
    if len(placement.machines) == 1:
        return OneMachine(group.under("memory"), spins)
    endpoint = _endpoint(group.names[group.rank], options.store)
    wire = Wire(group.under("sockets"), endpoint, key_among(_open_hosts(options.store)))
    if not placement.is_layered:
        return SeveralMachines(wire)
    return TwoLayers(group, placement, wire, spins)


def _open_hosts(store: Any) -> list[str]:
    """The host of the store, if it is none that means one machine alone."""
    host = getattr(_below(store), "host", "localhost")
    return [] if is_loopback(host) else [host]


def _below(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _endpoint(name: str, store: Any) -> Endpoint:
    """Where a rank listens: at the interface on the way to the host of the store."""
    store, interface = _below(store), chosen_interface()
    host, port = getattr(store, "host", ELSEWHERE), getattr(store, "port", 0)
    try:
        host = interface or own_address(host, port)
    except OSError as error:
        raise RefusedCallError(
            f"{name} has no way to {host}, by which other machines could reach it: {error}",
            f"Set {ENV_INTERFACE} to the interface or address that they reach.",
        ) from error
    return Endpoint(name, host, tuple(port_range() or (DRAWN,)), interface=interface)


def renew(options: Any) -> None:
    """Give each group that a process makes under one name keys of its own in the store.

    Where a launcher keeps the store it outlives a group that was destroyed, with what was said.
    """
    made = options.store.add(f"made/{options.group_rank}", 1)
    options.store = dist.PrefixStore(str(made), options.store)


def beside(options: Any, address: str) -> Any:
    """A gloo group of the same ranks: torch's C++ parts call it where they do not know ours.

    They call a few operations only by a table of their own, as the functional ``all_gather`` into
    a given tensor. Its ranks connect when it is used first, at ``address`` unless that is "".
    """
    store = dist.PrefixStore("gloo", options.store)
    gloo: Any = dist.ProcessGroupGloo
    made = gloo._Options()
    made._timeout = options.timeout
    made._devices = [
        gloo.create_device(hostname=address, lazy_init=True)
        if address
        else gloo.create_default_device(lazy_init=True)
    ]
    return gloo(store, options.group_rank, options.group_size, made)


def refuse_others(devices: Mapping[str, str]) -> None:
    """Refuse a group that has other backends beside ours.

    torch takes a group of ours for that of all devices, so that ``cpu:spartito,cuda:nccl`` would
    leave no NCCL.

    Args:
        devices: The name of the backend of each type of device.
    """
    if dict(devices) != {"cpu": "spartito"}:
        listed = ",".join(f"{device}:{backend}" for device, backend in devices.items())
        raise RefusedCallError(
            f"backend {listed!r}: 'spartito' has the CPU, and no other backend beside it",
            "Take 'spartito' for a program on CPUs; for one with CPU and GPU 'cpu:gloo,cuda:nccl', "
            "and a new_group(backend='spartito') for tensors on the CPU.",
        )


def _met(group: Membership) -> list[TaskInfo]:
    """What the ranks of the group say of themselves."""
    host = host_key() if shares_memory() else group.names[group.rank]
    own = TaskInfo(host, Versions.own(), Cores.own(), fingerprint(read_secret()))
    text = msgspec.json.encode(own).decode()
    missing, texts = group.under("came").sign_in(group.timeout, text)
    if missing:
        raise LostRankError(
            f"{' and '.join(missing)} did not come within {group.timeout:g} s",
            "Start all ranks of the group; the argument timeout of init_process_group and "
            "new_group sets the limit.",
        )
    return [msgspec.json.decode(each, type=TaskInfo) for each in texts]
