"""MLP: the time of a step of `fit` beside Lightning, Transformers' Trainer, Keras and a loop."""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from importlib.util import find_spec

from benchmarks.common import (
    Figure,
    Windows,
    announce,
    conclude,
    interpreter,
    parser,
    positive,
    progress,
)
from benchmarks.launching import run_job

SIZES = (32, 256)
STEPS = {32: 400, 256: 100}
OTHERS = {
    "loader": "a loop over a DataLoader",
    "lightning": "Lightning",
    "transformers": "Transformers' Trainer",
    "keras": "Keras on torch",
}
PACKAGES = {"lightning": "pytorch_lightning", "transformers": "transformers"}
TARGET = 1.0
"""`fit` takes no longer than any of them."""


def main() -> None:
    """Print how many times as long each of the others takes for a step."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    options.add_argument("--epochs", type=positive, default=3, help="windows of a turn")
    options.add_argument("--workers", type=positive, nargs="+", default=[1, 2])
    options.add_argument(
        "--keras", metavar="PYTHON", type=interpreter, help="an interpreter that has Keras"
    )
    options.add_argument(
        "--cpu", action="store_true",
        help="count the CPU time of one process, not the clock's: beside other work",
    )  # fmt: skip
    given = options.parse_args()
    if given.cpu and given.workers != [1]:
        options.error("--cpu is of one process, which waits for nobody: add --workers 1")
    here = announce(__doc__)
    figures: list[Figure] = []
    found: dict[str, Windows] = {}
    for workers in given.workers:
        sides = runners(workers, given.keras)
        for size in SIZES:
            windows = race(sides, workers, size, given)
            times = {side: statistics.median(seconds) for side, seconds in windows.items()}
            where = f"{workers} process{'es' * (workers > 1)}, batch {size}"
            figures += [
                Figure(f"{where}: {name} / fit", times[side] / times["fit"], TARGET)
                for side, name in OTHERS.items()
                if side in times
            ]
            figures.append(Figure(f"{where}: a step of fit", times["fit"] * 1e3, measure="ms"))
            found[where] = windows
    conclude(here, figures, given.json, seconds_per_step=found)


def runners(workers: int, keras: str | None) -> dict[str, str]:
    """The sides that can run here, and the interpreter of each; says why others cannot."""
    sides = {"fit": sys.executable, "loader": sys.executable}
    for side, package in PACKAGES.items():
        if find_spec(package) is None:
            print(f"{OTHERS[side]} skipped: {package} is not installed")
        else:
            sides[side] = sys.executable
    if workers > 1:
        print("Keras skipped: on torch its fit has one process")
    elif keras is None:
        print("Keras skipped: name an interpreter that has it with --keras PYTHON")
    else:
        sides["keras"] = keras
    return sides


def race(sides: dict[str, str], workers: int, size: int, given: Namespace) -> Windows:
    """Seconds per step in all windows of each side, which take turns."""
    found: Windows = {side: [] for side in sides}
    amount = [f"--size={size}", f"--steps={STEPS[size]}", f"--epochs={given.epochs}"]
    amount += ["--cpu"] if given.cpu else []
    for number in range(given.rounds):
        now = {}
        for side in sides if number % 2 == 0 else reversed(sides):
            program = ["-m", "benchmarks.jobs.trainers", side, *amount]
            windows = run_job(program, workers=workers, python=sides[side])
            found[side] += windows
            now[f"{side} of {size}"] = statistics.median(windows) * 1e3
        progress(number, given.rounds, now, "ms a step")
    return found


if __name__ == "__main__":
    main()
