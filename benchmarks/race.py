"""Training steps side by side: short jobs of each side take turns, and the medians count."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Windows, interpreter, parser, positive, progress, rates
from benchmarks.launching import run_job

WORKERS = 2
TENSORFLOW = "tensorflow"
OURS = ("fit", "loop", "central")


def race_parser(description: str, rounds: int, windows: int, steps: int) -> argparse.ArgumentParser:
    """The command line of a race."""
    made = parser(description, rounds)
    made.add_argument("--windows", type=positive, default=windows, help="windows of a turn")
    made.add_argument("--steps", type=positive, default=steps, help="steps of a window")
    made.add_argument(
        "--tensorflow",
        metavar="PYTHON",
        type=interpreter,
        help="an interpreter that has TensorFlow",
    )
    made.add_argument(
        "--peer-malloc",
        choices=("same", "default"),
        default="same",
        help="the malloc settings that the others get: ours, or glibc's",
    )
    return made


def race(
    model: str, sides: Sequence[str], local_batch: int, given: argparse.Namespace, precision: str
) -> Windows:
    """Seconds per step in all windows of each side; TensorFlow joins where it was named."""
    runners = [*sides, TENSORFLOW] if given.tensorflow else list(sides)
    if given.tensorflow and shutil.which(given.tensorflow) is None:
        sys.exit(f"--tensorflow {given.tensorflow}: there is no such interpreter")
    if not given.tensorflow:
        print("TensorFlow skipped: name an interpreter that has it with --tensorflow PYTHON")
    found: Windows = {side: [] for side in runners}
    for number in range(given.rounds):
        now: Windows = {}
        # Every second round runs backwards, so that no side always follows the same one.
        for side in runners if number % 2 == 0 else reversed(runners):
            now[side] = _turn(side, model, given, precision)
            found[side] += now[side]
        values = rates({side: now[side] for side in runners}, local_batch * WORKERS)
        progress(number, given.rounds, values, "examples/s")
    return found


def _turn(side: str, model: str, given: argparse.Namespace, precision: str) -> list[float]:
    script = [str(Path(__file__).parent / "jobs" / "tensorflow_steps.py")]
    program = script if side == TENSORFLOW else ["-m", "benchmarks.jobs.steps", side]
    amount = [f"--windows={given.windows}", f"--steps={given.steps}", f"--precision={precision}"]
    windows: list[float] = run_job(
        [*program, model, *amount],
        workers=WORKERS,
        python=given.tensorflow if side == TENSORFLOW else sys.executable,
        malloc=given.peer_malloc == "same" or side in OURS,
    )
    return windows
