"""What `test_device_groups` runs on every task, which has a device and a process group for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from spartito.accelerators import own_device
from spartito.cluster.resolver import resolve
from spartito.collectives.membership.rendezvous import Rendezvous
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.errors import SpartitoError
from tests import simulated
from tests.collectives.staged_jobs import made_by


def _joined(timeout: float = 60.0, communication: str = "auto") -> Rendezvous:
    cluster = resolve()
    device = own_device(None, cluster.local_rank, cluster.local_size)
    return Rendezvous(cluster, device, timeout, communication)


def operations() -> dict[str, Any]:
    """The results of each operation, on the device and on the host, and what these cost."""
    with _joined() as rendezvous:
        group = rendezvous.group()
        assert isinstance(group, ProcessGroupCollective)
        with simulated.counting() as of_host:
            here = made_by(group, torch.device("cpu"))
        with simulated.counting() as of_device:
            group.all_reduce(torch.ones(3, device=rendezvous.device))
            group.all_gather(torch.ones(3, device=rendezvous.device))
            group.barrier()
        return {
            "there": made_by(group, rendezvous.device),
            "here": here,
            "touched": sum(of_host.values()),
            "read": sum(of_device[kind] for kind in (simulated.READS, simulated.TO_HOST)),
            "host": type(group.host).__name__,
        }


def scalars() -> tuple[list[float], int, list[bool]]:
    """Sums of a number of the host, of a device, and of either; reads; what stays there."""
    with _joined() as rendezvous:
        group = rendezvous.group()
        assert isinstance(group, ProcessGroupCollective)
        rank = float(group.rank)
        there = torch.tensor(rank, device=rendezvous.device)
        with simulated.counting() as counts:
            came = group.gather_scalars((rank, there, there if group.rank else 0.5))
        reads = counts[simulated.READS] + counts[simulated.TO_HOST]
        assert [row[0] for row in came.rows] == list(map(float, range(group.world_size)))
        kept = [isinstance(each, torch.Tensor) for each in came.sums]
        return [float(each) for each in came.sums], reads, kept


def mismatched(kind: str) -> str:
    """What a task is told whose call is not that of the first, for a tensor of a device."""
    with _joined() as rendezvous:
        group, device = rendezvous.group(), rendezvous.device
        first = group.rank == 0
        calls: dict[str, Callable[[], object]] = {
            "size": lambda: group.all_reduce(torch.ones(3 + first, device=device)),
            "operation": lambda: (group.all_reduce if first else group.all_gather)(
                torch.ones(3, device=device)
            ),
            "device": lambda: group.all_reduce(torch.ones(3, device="cpu" if first else device)),
        }
        try:
            calls[kind]()
        except SpartitoError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def lost(victim: int) -> str:
    """What those who live are told when a task dies between two calls."""
    with _joined() as rendezvous:
        group, device = rendezvous.group(), rendezvous.device
        group.all_reduce(torch.ones(3, device=device))
        if group.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            group.all_reduce(torch.ones(3, device=device))
        except SpartitoError as error:
            return f"{type(error).__name__}: {error}"
    return ""
