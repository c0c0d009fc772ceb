"""What the processes of a job have to hear of their TPU before they start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from zlib import crc32

from spartito.cluster.address_list import count
from spartito.cluster.tpu import TOPOLOGY, Slice
from spartito.errors import UserError
from spartito.names import plural
from spartito.system.tpus import Attached
from spartito.wire.addresses import address
from spartito.wire.ports import free_ports

ADDRESSES, LAYOUT = "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY"
EACH, PROFILE = "TORCH_TPU_DEVICES_PER_HOST", "TORCH_TPU_XPROF_SESSION_ID"
"""Of torch_tpu 0.2.0, the same in all processes: one address for each rank, the devices of all
ranks as a box, the processes of a host, and a number by which their profiles belong together."""

BASE_PORT, FIRST_PORT = "TORCH_TPU_BASE_PORT", 8070
"""Where the processes of each of several hosts meet: torch_tpu's own variable and default."""

HOST = "localhost"

LAYOUTS = {
    "v4": {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"},
    "v5p": {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"},
    "v5e": {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"},
    "v6e": {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"},
    "tpu7x": {2: "1,1,1,2", 4: "1,2,1,2", 8: "2,2,1,2"},
}
"""The box that so many devices of one host are, by generation, as torch_tpu has them."""

HALVES = {"tpu7x": 2}
"""Generations of which a chip is several devices."""


def tpu_variables(addresses: Sequence[str], layout: str, each: int) -> dict[str, str]:
    """What torch_tpu reads in every process of a slice.

    Which chip is a process's own it finds by ``LOCAL_RANK``, and says so to its driver itself
    (``TPU_VISIBLE_CHIPS``): all processes see one environment but for their ranks.

    Args:
        addresses: one for each rank of the slice, in order.
        layout: the box of their devices, as ``4,4,1``.
        each: the processes of each host.

    Returns:
        The variables.
    """
    listed = ",".join(addresses)
    # Hosts that start their processes apart come to one number so.
    profile = str(crc32(listed.encode()))
    return {ADDRESSES: listed, LAYOUT: layout, EACH: str(each), PROFILE: profile}


def slice_layout(topology: str, generation: str, ranks: int) -> str | None:
    """The box of a slice with a process for each device.

    Args:
        topology: its chips as Google writes them: ``4x4``, ``2x2x4``.
        generation: as `Attached` has it.
        ranks: the processes of the slice.

    Returns:
        As ``4,4,1``; None where they do not fill it.

    Raises:
        UserError: ``topology`` is none.
    """
    try:
        sides = [int(side) for side in topology.lower().split("x")]
    except ValueError as error:
        raise UserError(
            f"{TOPOLOGY}={topology!r} is no topology", "Its sides are numbers, as in 4x4 or 2x2x4."
        ) from error
    sides += [1] * (3 - len(sides))
    if generation in HALVES:
        sides.append(HALVES[generation])
    return ",".join(map(str, sides)) if math.prod(sides) == ranks else None


def of_tpu(
    env: Mapping[str, str], found: Attached, here: Slice | None, nodes: int, workers: int
) -> tuple[dict[str, str], str]:
    """What ``workers`` processes of this host hear of its TPU.

    Args:
        env: what they inherit; what it says of this already stays.
        found: the TPU.
        here: the slice, where somebody knows of one.
        nodes: the machines of the job.
        workers: the processes that start here.

    Returns:
        The variables, and what to tell the user where there are none.

    Raises:
        UserError: what is said of the slice cannot be.
    """
    if ADDRESSES in env or LAYOUT in env:
        return {}, ""
    hosts = here.hosts if here is not None else ()
    if here is None or len(hosts) < 2 or nodes != here.slices * len(hosts):
        # One host, alone or beside others that its chips are not wired to.
        layout = LAYOUTS[found.generation].get(workers)
        if layout is None:
            return {}, _odd(workers, found)
        ports = free_ports(workers)
        return tpu_variables([address(HOST, port) for port in ports], layout, workers), ""
    if not here.topology:
        return {}, f"nothing says how the chips of the slice lie: {TOPOLOGY}=4x4 would"
    layout = slice_layout(here.topology, found.generation, len(hosts) * workers)
    if layout is None:
        return {}, _odd(workers, found)
    first = count(env, BASE_PORT, FIRST_PORT)
    # Of this slice alone: torch_tpu joins what TPU_WORKER_HOSTNAMES names, which GKE sets for
    # each slice. That several slices find each other by MEGASCALE_ variables is left to it.
    addresses = [address(host, first + index) for host in hosts for index in range(workers)]
    return tpu_variables(addresses, layout, workers), ""


def _odd(workers: int, found: Attached) -> str:
    kind = f"{found.devices} devices of a {found.generation} TPU"
    return (
        f"{plural(workers, 'worker')} on a machine with {kind}, which they do not "
        "fill: torch_tpu was told nothing of it"
    )
