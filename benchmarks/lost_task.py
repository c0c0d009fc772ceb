"""MLP, parameter servers with replicas=2: SIGKILL of a primary, of its backup, of a worker.

Seconds until every worker has replies to its pushes again, and updates that were lost or doubled;
the longest pause of the other worker.
"""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.common import Figure, announce, conclude, parser, positive
from benchmarks.killing import run_killing

WORKERS = 2
AFTER = 6.0
"""Seconds after the kill that are looked at."""
TARGETS = {"ps-0": 3.0, "ps-1": 3.0, "worker-1": 0.1}
"""Who is killed, and the seconds to reach."""
NAMES = {"ps-0": "primary", "ps-1": "backup", "worker-1": "worker"}


def main() -> None:
    """Print the longest pause of every kill, and what the servers counted."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=2)
    options.add_argument("--epochs", type=positive, default=40, help="passes over 8192 examples")
    given = options.parse_args()
    here = announce(__doc__)
    found: dict[str, list[tuple[float, float, int, int]]] = {victim: [] for victim in TARGETS}
    for number in range(given.rounds):
        for victim, results in found.items():
            results.append(turn(victim, given.epochs))
            pause, usual, lost, doubled = results[-1]
            print(
                f"round {number + 1}: SIGKILL of the {NAMES[victim]}: {pause * 1e3:.0f} ms, "
                f"before it at most {usual * 1e3:.0f}; lost {lost}, doubled {doubled}"
            )
    figures = []
    for victim, results in found.items():
        name = f"SIGKILL of the {NAMES[victim]}"
        pause = median(result[0] for result in results)
        figures += [
            Figure(f"{name}: longest pause", pause, TARGETS[victim], "<=", "s"),
            Figure(f"{name}: longest pause before it", median(r[1] for r in results), measure="s"),
            Figure(f"{name}: updates lost", sum(r[2] for r in results), 0, "<=", "updates"),
            Figure(f"{name}: updates doubled", sum(r[3] for r in results), 0, "<=", "updates"),
        ]
    conclude(here, figures, given.json)


def turn(victim: str, epochs: int) -> tuple[float, float, int, int]:
    """Longest pause after the kill, and as long before it; updates lost, doubled."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *("--strategy", "parameter_server", "--workers", str(WORKERS), "--ps", "2", "--chief"),
            *("-m", "benchmarks.jobs.lost_task", str(epochs)),
        ]
        workers = [f"worker-{index}" for index in range(WORKERS)]
        when = run_killing(words, Path(folder), victim, workers, AFTER / 2)
        times = [
            json.loads(path.read_text()) for path in Path(folder).glob("worker-*.json")
            if path.stem != victim
        ]  # fmt: skip
        counts = json.loads(Path(folder, "counts.json").read_text())
    after = max(longest(own, when, when + AFTER) for own in times)
    before = max(longest(own, when - AFTER / 2, when) for own in times)
    lost = counts["expected"] - counts["work_items"] + counts["lost"]
    return after, before, lost, counts["updates"] - counts["work_items"]


def longest(times: list[float], begin: float, end: float) -> float:
    """The longest time without a step, among those that touch these seconds."""
    return max((b - a for a, b in pairwise(times) if b > begin and a < end), default=0.0)


if __name__ == "__main__":
    main()
