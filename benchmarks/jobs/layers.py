"""Times reductions as in a step under several ways to communicate, in turns, on each replica."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from spartito.cluster.resolver import resolve
from spartito.collectives.collective import Collective
from spartito.collectives.membership.rendezvous import connect
from spartito.wire.addresses import split_address

TIMEOUT = 60.0
REPEATS = 100
WARM = 20


def main() -> None:
    """Rank 0 writes ``{floats: {way: [seconds per reduction]}}`` to the file."""
    options = argparse.ArgumentParser()
    options.add_argument("--windows", type=int, required=True)
    options.add_argument("--floats", type=int, nargs="+", required=True)
    options.add_argument("--ways", nargs="+", required=True)
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    cluster = resolve()
    assert cluster.rendezvous is not None
    host, port = split_address(cluster.rendezvous)
    found: dict[int, dict[str, list[float]]] = {
        floats: {way: [] for way in given.ways} for floats in given.floats
    }
    for window in range(given.windows):
        for way in given.ways if window % 2 == 0 else reversed(given.ways):
            port += 1  # a store of its own for each group: nothing else runs on these machines
            there = replace(cluster, rendezvous=f"{host}:{port}")
            group = connect(there, torch.device("cpu"), TIMEOUT, way)
            for floats in given.floats:
                found[floats][way].append(seconds(group, floats))
            group.barrier()
            group.close()
    if cluster.rank == 0:
        given.out.write_text(json.dumps(found))


def seconds(group: Collective, floats: int) -> float:
    """Seconds per reduction of so many floats: copied in, summed, scaled; with two scalars."""
    gradient = torch.ones(floats)
    reducer = group.reducer(floats, torch.float32, torch.device("cpu"))

    def step() -> None:
        reducer.input.copy_(gradient)
        reducer.reduce((1.0, 0.0), float(group.world_size))

    for _ in range(WARM):
        step()
    group.barrier()
    began = time.perf_counter()
    for _ in range(REPEATS):
        step()
    taken = (time.perf_counter() - began) / REPEATS
    assert torch.equal(reducer.output, gradient * group.world_size)
    return taken


if __name__ == "__main__":
    main()
