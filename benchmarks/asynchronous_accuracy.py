"""Validation accuracy on the digits at equal epochs, 2 workers: parameter_server, mirrored."""

from __future__ import annotations

import json
import statistics
import tempfile
from typing import Any

from benchmarks.common import Figure, announce, conclude, parser, positive, progress
from benchmarks.launching import run_quietly
from benchmarks.race import WORKERS

TARGET = 0.5
"""Points of validation accuracy, of 100."""
SIDES = {"parameter_server": ("--ps", "1"), "multi_worker_mirrored": ()}
"""The strategies, and what `spartito train` is told beside."""


def main() -> None:
    """Print the mean accuracies over the seeds, and by how much the asynchronous one is less."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    options.add_argument("--epochs", type=positive, default=10, help="of each training")
    given = options.parse_args()
    here = announce(__doc__)
    curves: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(given.rounds):
        for side in SIDES:
            curves[side].append(train(side, number, given.epochs))
        last = {side: 100 * curves[side][-1]["val_accuracy"] for side in SIDES}
        progress(number, given.rounds, last, "% of the validation digits")
    mean = {
        side: 100 * statistics.mean(found["val_accuracy"] for found in ends)
        for side, ends in curves.items()
    }
    first, second = SIDES
    figures = [
        Figure(f"points that {first} is less", mean[second] - mean[first], TARGET, "<="),
        *(Figure(f"{side} (%)", mean[side]) for side in SIDES),
        *(Figure(f"{side}, spread over seeds", spread(curves[side])) for side in SIDES),
    ]
    conclude(here, figures, given.json, epochs=given.epochs, runs=curves)


def train(side: str, seed: int, epochs: int) -> dict[str, Any]:
    """What `spartito train mnist --json` prints last."""
    with tempfile.TemporaryDirectory() as folder:
        said = run_quietly(
            [
                *("-m", "spartito", "train", "mnist", "--strategy", side),
                *("--workers", str(WORKERS), *SIDES[side]),
                *("--epochs", str(epochs), "--seed", str(seed)),
                *("--out", f"{folder}/run", "--json"),
            ]
        )
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def spread(ends: list[dict[str, Any]]) -> float:
    """Points between the best and the worst seed."""
    values = [100 * float(end["val_accuracy"]) for end in ends]
    return max(values) - min(values)


if __name__ == "__main__":
    main()
