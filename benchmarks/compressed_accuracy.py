"""Validation accuracy on the digits at equal epochs, 2 workers by sockets: exact, compressed."""

from __future__ import annotations

import json
import statistics
import tempfile
from typing import Any

from benchmarks.common import Figure, announce, conclude, parser, positive, progress
from benchmarks.launching import run_quietly
from benchmarks.race import WORKERS

TARGET = 0.3
"""Points of validation accuracy, of 100."""
SIDES = {"exact": None, "bf16": "bf16", "powersgd": "powersgd:4"}


def main() -> None:
    """Print the mean accuracies over the seeds, and by how much the compressed ones are less."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    options.add_argument("--epochs", type=positive, default=10, help="of each training")
    given = options.parse_args()
    here = announce(__doc__)
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(given.rounds):
        for side in SIDES:
            found[side].append(100 * train(side, number, given.epochs)["val_accuracy"])
        last = {side: values[-1] for side, values in found.items()}
        progress(number, given.rounds, last, "% of the validation digits")
    mean = {side: statistics.mean(values) for side, values in found.items()}
    figures = [Figure(f"{side} (%)", mean[side], measure="%") for side in SIDES]
    figures += [
        Figure(f"points that {side} is less", mean["exact"] - mean[side], TARGET, "<=", "points")
        for side in ("bf16", "powersgd")
    ]
    conclude(here, figures, given.json, epochs=given.epochs, accuracies=found)


def train(side: str, seed: int, epochs: int) -> dict[str, Any]:
    """What `spartito train mnist --json` prints last."""
    strategy = {"communication": "sockets", "compress": SIDES[side]}
    with tempfile.TemporaryDirectory() as folder:
        said = run_quietly(
            [
                *("-m", "spartito", "train", "mnist", "--strategy", "multi_worker_mirrored"),
                *("--strategy-options", json.dumps(strategy), "--workers", str(WORKERS)),
                *("--epochs", str(epochs), "--seed", str(seed)),
                *("--out", f"{folder}/run", "--json"),
            ]
        )
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
