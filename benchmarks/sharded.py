"""A GPT of 25M parameters under sharded against mirrored and FSDP2: memory and time per step."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common import Figure, announce, conclude, parser, positive, progress
from benchmarks.launching import run_job

BY_TORCH = "sharded:communication=fsdp"
BLOCKS = {"gpt-25M": ",block_bytes=8000000", "gpt-5M": ",block_bytes=2000000"}
"""Those that FSDP2 gets by hand: a transformer's."""
SIDES = ("mirrored", "sharded", BY_TORCH, "fsdp2:gloo", "fsdp2:spartito")
ON_GPUS = ("mirrored", "sharded:communication=process_group", BY_TORCH, "fsdp2:nccl")
NAMES = {
    BY_TORCH: "sharded by FSDP2",
    "sharded:communication=process_group": "sharded by our engine on NCCL",
    "fsdp2:gloo": "FSDP2 on gloo",
    "fsdp2:spartito": "FSDP2 on our backend",
    "fsdp2:nccl": "FSDP2 on NCCL",
}
MEMORY, FASTER, SLOWER, BY_HAND = 0.45, 1.4, 1.15, 1.1


def main() -> None:
    """Print MiB and milliseconds of each side, and the ratios with their targets."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=2)
    options.add_argument("--workers", type=positive, default=4, help="processes (4)")
    options.add_argument("--size", choices=("gpt-25M", "gpt-5M"), default="gpt-25M")
    options.add_argument("--gpus", action="store_true", help="one for each process, by NCCL")
    given = options.parse_args()
    here = announce(__doc__)
    sides = ON_GPUS if given.gpus else SIDES
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    memory: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(given.rounds):
        now = {}
        for side in sides if number % 2 == 0 else reversed(sides):
            least = BLOCKS[given.size] if side == BY_TORCH else ""
            job = ["-m", "benchmarks.jobs.shardings", f"{side}{least}", "--size", given.size]
            found: list[Any] = run_job(job, workers=given.workers)
            peaks, windows, _ = zip(*found, strict=True)
            seconds[side] += windows[0]
            memory[side].append(sum(peak["peak"] for peak in peaks) / given.workers)
            now[side] = statistics.median(windows[0]) * 1e3
        progress(number, given.rounds, now, "ms a step")
    figures = []
    for side in sides:
        name = NAMES.get(side, side)
        figures.append(Figure(f"{name}: time per step", _ms(seconds[side]), measure="ms"))
        mib = statistics.median(memory[side])
        figures.append(Figure(f"{name}: memory of a process", mib, measure="MiB"))
    bare = "fsdp2:nccl" if given.gpus else "fsdp2:gloo"
    by_hand = _ms(seconds[BY_TORCH]) / _ms(seconds[bare])
    figures.append(
        Figure("time per step: sharded by FSDP2 / FSDP2 by hand", by_hand, BY_HAND, "<=")
    )
    if not given.gpus:
        ratio = statistics.median(memory["sharded"]) / statistics.median(memory["mirrored"])
        gloo = _ms(seconds["fsdp2:gloo"]) / _ms(seconds["sharded"])
        times = _ms(seconds["sharded"]) / _ms(seconds["mirrored"])
        figures += [
            Figure("memory of a process: sharded / mirrored", ratio, MEMORY, "<="),
            Figure("time per step: FSDP2 on gloo / sharded", gloo, FASTER),
            Figure("time per step: sharded / mirrored", times, SLOWER, "<="),
        ]
    conclude(here, figures, given.json, seconds=seconds, memory=memory)


def _ms(values: list[float]) -> float:
    return statistics.median(values) * 1e3


if __name__ == "__main__":
    main()
