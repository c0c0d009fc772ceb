"""Milliseconds of a reduction, machines (network namespaces) of 2: hierarchical and flat gloo."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common import Figure, announce, conclude, parser, positive, progress
from benchmarks.machines import run_on_machines

WINDOWS = 4
NAMES = {269_322: "MLP", 2_782_649: "cats-vs-dogs"}
WAYS = {"auto": "hierarchical", "process_group": "flat gloo"}


def main() -> None:
    """Print the milliseconds of each way, and how many times faster the layers are."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    options.add_argument("--machines", type=positive, default=2, help="2 replicas on each")
    given = options.parse_args()
    if given.machines < 2:
        options.error("--machines 1 has nothing between the machines")
    here = announce(__doc__)
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(given.rounds):
        for floats, ways in measure(given.machines).items():
            name = f"{NAMES[int(floats)]}, {int(floats):,} floats"
            now = {WAYS[way]: statistics.median(values) * 1e3 for way, values in ways.items()}
            progress(number, given.rounds, now, f"ms, {name}")
            for way, values in ways.items():
                found.setdefault(name, {}).setdefault(WAYS[way], []).extend(values)
    figures = []
    for name, sides in found.items():
        median = {side: statistics.median(values) for side, values in sides.items()}
        figures += [Figure(f"{name}: {side}", median[side] * 1e3, measure="ms") for side in median]
        layers, flat = (median[side] for side in WAYS.values())
        figures.append(Figure(f"{name}: flat gloo / hierarchical", flat / layers))
    conclude(here, figures, given.json, seconds=found)


def measure(count: int) -> Any:
    """``{floats: {way: [seconds]}}`` of one job on so many machines."""
    job = ["-m", "benchmarks.jobs.layers", f"--windows={WINDOWS}"]
    job += ["--floats", *map(str, NAMES), "--ways", *WAYS]
    return run_on_machines(job, machines=count, workers=2)


if __name__ == "__main__":
    main()
