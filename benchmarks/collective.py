"""Milliseconds of an all-reduce on one host: shared memory, sockets and gloo, 2 ranks."""

from __future__ import annotations

import statistics

from benchmarks.common import Figure, announce, conclude, parser, progress
from benchmarks.launching import run_job

WORKERS = 2
WINDOWS = 5
NAMES = {"64": "64 floats", str(1 << 18): "1 MB", str(11 << 18): "11 MB"}
THEIRS = "gloo"


def main() -> None:
    """Print the milliseconds of each way, and how many times faster ours are."""
    assert __doc__ is not None
    given = parser(__doc__, rounds=3).parse_args()
    here = announce(__doc__)
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(given.rounds):
        job = ["-m", "benchmarks.jobs.reductions", f"--windows={WINDOWS}"]
        for floats, sides in run_job(job, workers=WORKERS).items():
            now = {side: statistics.median(values) * 1e3 for side, values in sides.items()}
            progress(number, given.rounds, now, f"ms, {NAMES[floats]}")
            for side, values in sides.items():
                found.setdefault(NAMES[floats], {}).setdefault(side, []).extend(values)
    figures = []
    for name, sides in found.items():
        median = {side: statistics.median(values) for side, values in sides.items()}
        figures += [Figure(f"{name}: {side}", median[side] * 1e3, measure="ms") for side in median]
        for ours in ("shared memory", "sockets"):
            times = median[THEIRS] / median[f"{ours}, as in a step"]
            figures.append(Figure(f"{name}: gloo / {ours}", times))
    conclude(here, figures, given.json, seconds=found)


if __name__ == "__main__":
    main()
