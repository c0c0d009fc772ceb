"""Times single operations in two layers, in one, and on gloo, in turns, on several machines."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.jobs.backends import OPERATIONS, SIZES, Task, race
from spartito.backend import connect

REPEATS = {"64 floats": 100, "1 MB": 8, "11 MB": 1}
TIMED = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")


def main() -> None:
    """Rank 0 writes ``{operation and size: {side: [seconds]}}`` to the file."""
    options = argparse.ArgumentParser()
    options.add_argument("--windows", type=int, required=True)
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("spartito")
    groups = {"two layers": dist.group.WORLD}
    connect.host_key = lambda: os.environ["RANK"]  # type: ignore[attr-defined]
    groups["one layer"] = dist.new_group(backend="spartito")  # as if no ranks shared memory
    groups["gloo"] = dist.new_group(backend="gloo")
    found = {}
    for size, floats in SIZES.items():
        for name in TIMED:
            task = Task(partial(OPERATIONS[name], floats=floats), REPEATS[size])
            found[f"{name}, {size}"] = race(task, groups, given.windows)
    if dist.get_rank() == 0:
        given.out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
