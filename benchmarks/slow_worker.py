"""MLP, 2 workers of which one runs a quarter of the time: parameter_server against mirrored."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.common import Figure, Windows, announce, conclude, parser, positive, progress, rates
from benchmarks.launching import run_quietly
from benchmarks.race import WORKERS

LOCAL_BATCH = 32
TARGET = 1.8
SIDES = {"parameter_server": ("--ps", "1"), "multi_worker_mirrored": ()}
"""The strategies, and what `spartito run` is told beside."""
SLOW = ("--slow", "worker:1=0.25")
EVEN = ", even"


def main() -> None:
    """Print the ratio of examples per second, and what the slow worker costs each strategy."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    options.add_argument("--windows", type=positive, default=3, help="windows of a turn")
    options.add_argument("--steps", type=positive, default=300, help="steps of a window")
    given = options.parse_args()
    here = announce(__doc__)
    sides = [*SIDES, *(side + EVEN for side in SIDES)]
    windows: Windows = {side: [] for side in sides}
    for number in range(given.rounds):
        now: Windows = {}
        # Every second round runs backwards, so that no side always follows the same one.
        for side in sides if number % 2 == 0 else reversed(sides):
            now[side] = turn(side, given)
            windows[side] += now[side]
        values = rates({side: now[side] for side in sides}, LOCAL_BATCH * WORKERS)
        progress(number, given.rounds, values, "examples/s")
    speed = rates(windows, LOCAL_BATCH * WORKERS)
    first, second = SIDES
    figures = [
        Figure(f"one slow: {first} / {second}", speed[first] / speed[second], TARGET),
        Figure(f"none slow: {first} / {second}", speed[first + EVEN] / speed[second + EVEN]),
        *(Figure(f"{side}: one slow / none", speed[side] / speed[side + EVEN]) for side in SIDES),
    ]
    conclude(here, figures, given.json, examples_per_second=speed, seconds_per_step=windows)


def turn(side: str, given: argparse.Namespace) -> list[float]:
    """Seconds per global batch of every window."""
    strategy = side.removesuffix(EVEN)
    slow = () if side.endswith(EVEN) else SLOW
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *("-m", "spartito", "run", "--strategy", strategy, "--workers", str(WORKERS)),
            *SIDES[strategy],
            *slow,
            *("-m", "benchmarks.jobs.asynchronous", f"--workers={WORKERS}"),
            *(f"--windows={given.windows}", f"--steps={given.steps}"),
        ]
        run_quietly(command, env={"BENCHMARK_FOLDER": folder})
        found: list[float] = json.loads(Path(folder, "windows.json").read_text())
    return found


if __name__ == "__main__":
    main()
