"""Times all-reduces by shared memory, sockets and gloo, in turns, and prints the windows."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from spartito.collectives.collective import Collective
from spartito.collectives.membership.store import Membership
from spartito.collectives.membership.torch_store import OfTorch
from spartito.collectives.memory.shared_memory import Cores, SharedMemoryCollective
from spartito.collectives.sockets.tcp import SocketCollective
from spartito.system.capacity import cgroup_quota
from spartito.wire.addresses import DRAWN, Endpoint

TIMEOUT = 60.0
REPEATS = {64: 500, 1 << 18: 100, 11 << 18: 15}
"""How many reductions of so many floats make a window."""


def main() -> None:
    """Rank 0 prints ``{floats: {side: [seconds per call]}}``."""
    options = argparse.ArgumentParser()
    options.add_argument("--windows", type=int, required=True)
    windows = options.parse_args().windows
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=TIMEOUT)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0,
        timeout=limit,
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("gloo", store),
        rank=rank,
        world_size=world_size,
        timeout=limit,
    )
    names = [f"worker {other}" for other in range(world_size)]
    group = Membership(rank, names, OfTorch(store), TIMEOUT)
    spins = Cores.own().suffice([Cores.own()] * world_size, cgroup_quota())
    shared = SharedMemoryCollective(group.under("shared"), spins)
    endpoint = Endpoint(names[rank], os.environ["MASTER_ADDR"], (DRAWN,))
    sockets = SocketCollective(group.under("beside"), endpoint)
    found: dict[int, dict[str, list[float]]] = {}
    for floats, repeats in REPEATS.items():
        calls = sides(shared, sockets, floats)
        found[floats] = {side: [] for side in calls}
        for _ in range(windows + 1):  # the first warms up
            for side, call in calls.items():
                found[floats][side].append(seconds(call, repeats, shared.barrier))
        for values in found[floats].values():
            del values[0]
    shared.barrier()
    shared.close()
    sockets.close()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found), flush=True)


def sides(
    shared: SharedMemoryCollective, sockets: SocketCollective, floats: int
) -> dict[str, Callable[[], object]]:
    """The ways to sum a tensor: gradients are copied in first where a step would do so."""
    gradient = torch.zeros(floats)
    return {
        "shared memory, as in a step": step(shared, gradient),
        "shared memory, all_reduce": lambda: shared.all_reduce(gradient),
        "sockets, as in a step": step(sockets, gradient),
        "sockets, all_reduce": lambda: sockets.all_reduce(gradient),
        "gloo": lambda: dist.all_reduce(gradient),
    }


def step(group: Collective, gradient: torch.Tensor) -> Callable[[], object]:
    """The reduction of a step, with two piggybacked scalars."""
    reducer = group.reducer(gradient.numel(), torch.float32, torch.device("cpu"))

    def call() -> None:
        reducer.input.copy_(gradient)
        reducer.reduce((1.0, 0.0), 2.0)

    return call


def seconds(call: Callable[[], object], repeats: int, meet: Callable[[], None]) -> float:
    """Seconds per call, all ranks starting together."""
    meet()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


if __name__ == "__main__":
    main()
