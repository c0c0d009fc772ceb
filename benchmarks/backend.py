"""Plain torch programs and single operations on the backend "spartito" against gloo, 2 ranks."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from benchmarks.common import Figure, announce, conclude, parser, progress
from benchmarks.launching import run_job

WORKERS = 2
WINDOWS = 6
BUSY = 4
PARTS = ("mlp", "large", "fsdp", "operations", "busy", "kill")
TARGETS = {"DDP, MLP": 1.8, "DDP, 11 MB of gradients": 1.1, "FSDP2, small GPT": 1.4}
BESIDE = f", beside {BUSY} busy processes"
Seconds = dict[str, dict[str, list[float]]]


def main() -> None:
    """Print how many times faster our backend is in each case, and the seconds to a lost rank."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    given = options.parse_args()
    here = announce(__doc__)
    found: Seconds = {}
    lost: list[float] = []
    for number in range(given.rounds):
        now: Seconds = {}
        if quiet := [part for part in PARTS[:4] if part in given.parts]:
            now |= _job(quiet)
        if "busy" in given.parts:
            with busy_processes(BUSY):
                slow = _job(["mlp", "large"])
            now |= {f"{name}{BESIDE}": sides for name, sides in slow.items()}
        if "kill" in given.parts:
            lost.append(seconds_to_the_error())
        progress(number, given.rounds, {name: _ratio(one) for name, one in now.items()}, "times")
        for name, sides in now.items():
            kept = found.setdefault(name, {})
            for side, values in sides.items():
                kept.setdefault(side, []).extend(values)
    figures = []
    for name, sides in found.items():
        for side, values in sides.items():
            seconds = statistics.median(values)
            figures.append(Figure(f"{name}: {side}", seconds * 1e3, measure="ms"))
        times = f"{name}: gloo / spartito"
        figures.append(Figure(times, _ratio(sides), TARGETS.get(name, 1.0)))
    if lost:
        name = "SIGKILL until the other's error names the rank"
        figures.append(Figure(name, statistics.median(lost), 1.0, "<=", "s"))
    conclude(here, figures, given.json, seconds=found, lost=lost)


def _job(parts: list[str]) -> Seconds:
    job = ["-m", "benchmarks.jobs.backends", *parts, f"--windows={WINDOWS}"]
    windows: Seconds = run_job(job, workers=WORKERS)
    return windows


def _ratio(sides: Mapping[str, list[float]]) -> float:
    return statistics.median(sides["gloo"]) / statistics.median(sides["spartito"])


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that never rest; they end with the block."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def seconds_to_the_error() -> float:
    """From the death of rank 1 to an error of rank 0 that has its name."""
    with tempfile.TemporaryDirectory() as folder:
        job = ["-m", "benchmarks.jobs.killed", "spartito", f"{folder}/when"]
        told = run_job(job, workers=WORKERS)
    if "rank 1" not in told["error"]:
        sys.exit(f"the error does not name rank 1: {told['error']}")
    return float(told["seconds"])


if __name__ == "__main__":
    main()
