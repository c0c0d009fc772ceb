"""Ways to divide a model, 2 processes: milliseconds of a step, all at the same global batch.

Ours against ours: a mesh (heads, hidden units and channels divided) against mirrored. Ours against
torch on gloo: a mesh against DTensor's parallelize_module, sharded against FSDP2. And the peak
memory of sharded on 4 processes against mirrored.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.common import Figure, Windows, announce, conclude, parser, positive, progress
from benchmarks.launching import run_job

WORKERS, IN_MEMORY = 2, 4
SIDES = {
    "gpt": ("mirrored", "mesh", "dtensor", "sharded", "fsdp2"),
    "cnn": ("mirrored", "mesh", "sharded", "fsdp2"),
}
"""What runs of each model; DTensor's convolutions of sharded weights are wrong without a word."""
STEPS = {"gpt": 10, "gpt-25m": 1, "cnn": 3}
NAMES = {
    "gpt": "GPT of 0.8 million parameters, 32 texts of 64",
    "cnn": "cats-vs-dogs CNN, 16 pictures of 96x96",
}
IN_MEMORY_SIDES = {
    "mirrored": ("mirrored", "gpt-25m"),
    "sharded": ("sharded", "gpt-25m"),
    "sharded under sp.meta()": ("sharded", "gpt-25m-meta"),
}
"""How it is called, the strategy and the model."""
PARTS = (*SIDES, "memory")
RATIOS = (
    ("mesh", "mirrored", 1.15, "<="),
    ("dtensor", "mesh", 1.3, ">="),
    ("fsdp2", "sharded", 1.4, ">="),
)
"""Seconds of one side over those of another, and what is to be reached."""
MEMORY_TARGET = 0.45


def main() -> None:
    """Print the time of a step of each side, the ratios, and the memory."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=4)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    options.add_argument("--windows", type=positive, default=3, help="windows of a turn")
    given = options.parse_args()
    here = announce(__doc__)
    figures: list[Figure] = []
    seconds = {model: race(model, given) for model in SIDES if model in given.parts}
    for model, windows in seconds.items():
        figures += compared(NAMES[model], windows)
    peaks: dict[str, list[dict[str, float]]] = {}
    if "memory" in given.parts:
        for name, (side, model) in IN_MEMORY_SIDES.items():
            peaks[name] = job(side, model, 1, 2, "--memory")
        figures += remembered(peaks)
        show_parts(peaks)
    conclude(here, figures, given.json, seconds=seconds, memory=peaks)


def race(model: str, given: argparse.Namespace) -> Windows:
    """Seconds per step in all windows of each side; short jobs take turns."""
    found: Windows = {side: [] for side in SIDES[model]}
    for number in range(given.rounds):
        turn = SIDES[model] if number % 2 == 0 else SIDES[model][::-1]
        now = {side: job(side, model, given.windows, STEPS[model]) for side in turn}
        for side, windows in now.items():
            found[side] += windows
        shown = {f"{model} {side}": statistics.median(now[side]) * 1e3 for side in SIDES[model]}
        progress(number, given.rounds, shown, "ms")
    return found


def job(side: str, model: str, windows: int, steps: int, *more: str) -> Any:
    """What the processes of one side found."""
    program = ["-m", "benchmarks.jobs.model_parallel", side, model, *more]
    workers = IN_MEMORY if more else WORKERS
    return run_job([*program, f"--windows={windows}", f"--steps={steps}"], workers=workers)


def compared(name: str, windows: Windows) -> list[Figure]:
    """The milliseconds of each side, and what they are of each other."""
    middle = {side: statistics.median(seconds) for side, seconds in windows.items()}
    return [
        *(Figure(f"{name}: {side}", s * 1e3, measure="ms") for side, s in middle.items()),
        *(
            Figure(f"{name}: {one} / {other}", middle[one] / middle[other], target, relation)
            for one, other, target, relation in RATIOS
            if one in middle and other in middle
        ),
    ]


def remembered(peaks: dict[str, list[dict[str, float]]]) -> list[Figure]:
    """The highest process of each side, and what sharded is of mirrored.

    The target is for what the machine has: resident sizes count a shared page in each process.
    """
    figures = []
    meanings = {"resident": ("resident", None), "divided": ("shared pages divided", MEMORY_TARGET)}
    for kind, (meaning, target) in meanings.items():
        start = f"GPT of 25 million, {IN_MEMORY} processes, {meaning}"
        highest = {side: max(each[kind] for each in found) for side, found in peaks.items()}
        figures += [
            Figure(f"{start}: {side}", value, measure="MiB") for side, value in highest.items()
        ]
        figures += [
            Figure(f"{start}: {side} / mirrored", value / highest["mirrored"], target, "<=")
            for side, value in highest.items()
            if side != "mirrored"
        ]
    return figures


def show_parts(peaks: dict[str, list[dict[str, float]]]) -> None:
    """What the highest process of each side has at its peak, shared pages divided."""
    highest = {side: max(found, key=lambda each: each["divided"]) for side, found in peaks.items()}
    width = max(len(part) for part in highest["mirrored"])
    print(f"{'MiB at the peak':<{width}}  " + "  ".join(peaks))
    for part in highest["mirrored"]:
        values = (f"{each[part]:>{len(side)}.0f}" for side, each in highest.items())
        print(f"{part:<{width}}  " + "  ".join(values))


if __name__ == "__main__":
    main()
