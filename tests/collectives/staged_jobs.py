"""What `test_staged` runs on every task: each operation on tensors of a device, and of the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spartito.accelerators import own_device
from spartito.cluster.resolver import resolve
from spartito.collectives.collective import Collective
from spartito.collectives.membership.rendezvous import Rendezvous
from spartito.collectives.staged import StagedCollective, on_host
from spartito.errors import SpartitoError


def operations(communication: str) -> dict[str, Any]:
    """The results of each operation, on the device and on the host, and what was made."""
    cluster = resolve()
    device = own_device(None, cluster.local_rank, cluster.local_size)
    with Rendezvous(cluster, device, communication=communication) as rendezvous:
        group = rendezvous.group()
        assert isinstance(group, StagedCollective)
        found = {kind: made_by(group, kind) for kind in (device, torch.device("cpu"))}
        there, here = found.values()
        try:
            on_host(group).all_reduce(torch.ones(3, device=device))
            refusal = ""
        except SpartitoError as error:
            refusal = str(error)
    return {"there": there, "here": here, "refusal": refusal, "host": type(group.host).__name__}


def made_by(group: Collective, device: torch.device) -> dict[str, list[Any]]:
    """What each operation makes, as lists; it is where its tensor was."""
    rank, size = group.rank, group.world_size

    def own(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return (torch.arange(count, dtype=torch.float64) + 10 * rank).view(shape).to(device)

    reducer = group.reducer(4, torch.float64, device)
    reducer.input.copy_(own(4))
    told = reducer.reduce((1.0, float(rank)), 1.0)
    into = own(size, 3)
    group.all_gather_into(into, own(3))
    standing, other = own(5), own(4).half()
    add = group.summing(standing, other)
    group.barrier()
    add()
    several = [own(2), own(3)]
    group.reduce_all(*several)
    made = {
        "all_reduce": [group.all_reduce(own(2, 3))],
        "all_gather": group.all_gather(own(2)),
        "all_gather_into": [into],
        "all_gather_rows": group.all_gather_rows(own(rank, 2)),
        "broadcast": [group.broadcast(own(3), size - 1)],
        "reduce_scatter": [group.reduce_scatter(own(size, 2))],
        "all_to_all": [group.all_to_all(own(size, 2))],
        "reducer": [reducer.output],
        "summing": [standing, other],
        "reduce_all": several,
    }
    group.barrier()
    assert {part.device for parts in made.values() for part in parts} == {device}
    return {**{name: [p.tolist() for p in parts] for name, parts in made.items()}, "told": [told]}
