"""Milliseconds of a step of two machines on a thin line: exact, compressed, torch DDP on gloo."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.common import Figure, announce, conclude, parser, positive, progress
from benchmarks.machines import run_on_machines

SIDES = ("exact", "bf16", "powersgd", "ddp", "ddp 1 MB")

CASES = {
    "cats-100": ("xception", "100mbit", 2),
    "mlp-100": ("mlp", "100mbit", 10),
    "mlp-1000": ("mlp", "1gbit", 50),
}
"""Model, rate of the line, steps of a window."""

BITS = {"xception": 2_782_649 * 32, "mlp": 269_322 * 32}
"""Of all gradients: what each of two machines has to send in an exact step, without any head."""

RATES = {"100mbit": 1e8, "1gbit": 1e9}
"""Bits per second."""

TARGETS = {
    ("cats-100", "exact", "ddp"): 1.4,
    ("cats-100", "bf16", "ddp"): 1.9,
    ("cats-100", "powersgd", "ddp"): 2.0,
    ("cats-100", "exact", "ddp 1 MB"): 1.0,
    ("cats-100", "bf16", "ddp 1 MB"): 1.4,
    ("cats-100", "powersgd", "ddp 1 MB"): 1.45,
    ("mlp-100", "bf16", "ddp"): 1.9,
    ("mlp-100", "powersgd", "ddp"): 17.0,
    ("mlp-1000", "powersgd", "ddp"): 5.0,
}


def main() -> None:
    """Print the ratios to DDP with its default buckets, and with buckets of 1 MB."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=1)
    options.add_argument("--only", choices=tuple(CASES), help="one of the lines")
    options.add_argument("--side", choices=(*SIDES, "alone"), action="append", help="of these only")
    options.add_argument("--windows", type=positive, default=2, help="windows of a turn")
    given = options.parse_args()
    here = announce(__doc__)
    figures: list[Figure] = []
    seconds: dict[str, dict[str, list[float]]] = {}
    for case in [given.only] if given.only else CASES:
        model, rate, steps = CASES[case]
        sides = tuple(given.side or SIDES)
        found = seconds[case] = in_turns(given, case, sides, (model, rate, steps))
        median = {side: statistics.median(values) for side, values in found.items()}
        figures += [Figure(f"{case}: {s}", median[s] * 1e3, measure="ms") for s in sides]
        least = BITS[model] / RATES[rate]
        figures.append(Figure(f"{case}: all gradients on the line", least * 1e3, measure="ms"))
        figures += [
            Figure(f"{case}: {ours} / {theirs}", median[theirs] / median[ours], target)
            for (name, ours, theirs), target in TARGETS.items()
            if name == case and {ours, theirs} <= set(sides)
        ]
    conclude(here, figures, given.json, seconds=seconds)


def in_turns(
    given: argparse.Namespace, case: str, sides: Sequence[str], of: tuple[str, str, int]
) -> dict[str, list[float]]:
    """Seconds per step of each side in all rounds, of a model, a rate, and steps of a window."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    model, rate, steps = of
    for number in range(given.rounds):
        # Every second round runs backwards, so that no side always follows the same one.
        for side in sides if number % 2 == 0 else reversed(sides):
            found[side] += measure(side, model, rate, given.windows, steps)
        now = {side: statistics.median(found[side]) * 1e3 for side in sides}
        progress(number, given.rounds, now, f"ms a step, {case}")
    return found


def measure(side: str, model: str, rate: str, windows: int, steps: int) -> list[float]:
    """Seconds per step in the windows of one job on two machines of one worker each."""
    return list(measure_all(side, model, rate, windows, steps)["seconds"])


def measure_all(side: str, model: str, rate: str, windows: int, steps: int) -> dict[str, Any]:
    """As `measure`, and the part of the time in which meetings held up the training.

    Beside it that part of it in which they waited for what is exchanged.
    """
    job = ["-m", "benchmarks.jobs.lines", side, model, f"--windows={windows}", f"--steps={steps}"]
    return dict(run_on_machines(job, machines=2, workers=1, rate=rate))


if __name__ == "__main__":
    main()
