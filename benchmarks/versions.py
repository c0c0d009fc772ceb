"""Speed against another version: the same jobs with the sources of two checkouts, in turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.common import Figure, announce, conclude, parser, positive, progress

ROOT = Path(__file__).parents[1]
JOB = Path(__file__).parent / "jobs" / "version.py"
LIMIT = 300.0
TCP = '{"servers": {"shared_memory": false}}'
SIDES = {
    "one_device fit": ("fit", ["--strategy=one_device", "--workers=1"]),
    "one_device loop": ("loop", ["--strategy=one_device", "--workers=1"]),
    "mirrored fit": ("fit", ["--strategy=mirrored", "--workers=2"]),
    "mirrored loop": ("loop", ["--strategy=mirrored", "--workers=2"]),
    "central_storage fit": ("fit", ["--strategy=central_storage", "--workers=2"]),
    "parameter_server, shared memory": (
        "fit",
        ["--strategy=parameter_server", "--workers=2", "--ps=1"],
    ),
    "parameter_server, TCP": (
        "fit",
        ["--strategy=parameter_server", "--workers=2", "--ps=1", f"--strategy-options={TCP}"],
    ),
}
"""What is run, and the options of ``spartito run``."""


def main() -> None:
    """Print how many times as fast as the other version each job is."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=5)
    options.add_argument("--against", type=Path, required=True, help="a checkout of the other one")
    options.add_argument("--steps", type=positive, default=400, help="steps of a window")
    options.add_argument("--only", nargs="+", choices=SIDES, default=list(SIDES), metavar="JOB")
    given = options.parse_args()
    here = announce(__doc__)
    versions = {"here": ROOT, "other": given.against.resolve()}
    found: dict[str, dict[str, list[float]]] = {
        side: {version: [] for version in versions} for side in given.only
    }
    for number in range(given.rounds):
        for side, seconds in found.items():
            for version in versions if number % 2 == 0 else reversed(versions):
                seconds[version] += turn(side, versions[version], given.steps)
            now = {version: statistics.median(all_of) for version, all_of in seconds.items()}
            progress(number, given.rounds, {f"{side}, {v}": s * 1e6 for v, s in now.items()}, "us")
    figures = [
        Figure(side, statistics.median(both["other"]) / statistics.median(both["here"]), 1.0)
        for side, both in found.items()
    ]
    conclude(here, figures, given.json, seconds_per_step=found)


def turn(side: str, checkout: Path, steps: int) -> list[float]:
    """Seconds per step of each window of one job with the sources of ``checkout``."""
    kind, words = SIDES[side]
    done = subprocess.run(
        [sys.executable, "-m", "spartito", "run", *words, str(JOB), kind, f"--steps={steps}"],
        env={**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if "seconds_per_step" in line)
    seconds: list[float] = json.loads(line[line.index("{") :])["seconds_per_step"]
    return seconds


if __name__ == "__main__":
    main()
