"""``python -m tests.ps.simulation --schedules 10000``: which seeds fail, and the time."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from tests.ps.simulation.world import simulate


def failures(replicas: int, seeds: Sequence[int]) -> list[tuple[int, str]]:
    """The seeds whose schedules go wrong, and how."""
    torch.set_num_threads(1)
    return [(seed, why) for seed in seeds if (why := simulate(seed, replicas)) is not None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ps.simulation")
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--replicas", type=int, default=1, help="servers with the same values")
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args()
    began, cpu = time.perf_counter(), time.process_time()
    seeds = range(asked.first, asked.first + asked.schedules)
    found: list[tuple[int, str]] = []
    if asked.processes == 1:
        found = failures(asked.replicas, seeds)
    else:
        chunks = [seeds[at : at + 100] for at in range(0, len(seeds), 100)]
        with ProcessPoolExecutor(asked.processes) as pool:
            found = [
                one for part in pool.map(partial(failures, asked.replicas), chunks) for one in part
            ]
    for seed, why in found:
        print(f"seed {seed}: {why}")
    seconds = time.perf_counter() - began
    print(
        f"{asked.schedules} schedules, {len(found)} failed, {seconds:.1f} s"
        f" ({time.process_time() - cpu:.1f} s of this process)"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
