"""Validation accuracy on the digits at equal epochs, 2 workers: groups that meet, and mirrored."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.common import Figure, announce, conclude, parser, positive, progress
from benchmarks.slow_networks import Side, train

TARGET = 0.3
"""Points of validation accuracy, of 100."""
LR = 1e-3
"""Adam's, good for the global batch."""
MORE = math.sqrt(2)
"""Each of two groups makes its updates of half of the batch: see docs/guides/slow-networks.md."""


def main() -> None:
    """Print the mean accuracies over the seeds, and by how much that of the groups is less."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=5)
    options.add_argument("--epochs", type=positive, default=10, help="of each training")
    options.add_argument("--every", type=positive, default=20, help="updates between meetings")
    options.add_argument("--first", type=int, default=0, help="the first seed")
    given = options.parse_args()
    groups: dict[str, Any] = {"groups": 2, "every": given.every}
    bits = Side("local_sgd", {**groups, "compress": "4bit"})
    diloco = Side("local_sgd", {**groups, "outer": "diloco"})
    sides = {
        "mirrored": (Side("mirrored"), LR),
        "average, same rate": (Side("local_sgd", groups), LR),
        "average, 1.41 times the rate": (Side("local_sgd", groups), MORE * LR),
        "average in 4 bits, 1.41 times the rate": (bits, MORE * LR),
        "diloco, half the rate": (diloco, LR / 2),
    }
    here = announce(__doc__)
    found: dict[str, list[float]] = {side: [] for side in sides}
    for seed in range(given.first, given.first + given.rounds):
        job = ["-m", "benchmarks.jobs.slow_networks", "digits"]
        job += [f"--epochs={given.epochs}", f"--seed={seed}"]
        for name, (side, lr) in sides.items():
            history = train(side.command(*job, f"--lr={lr}"))
            found[name].append(100 * history[-1]["val_accuracy"])
        last = {side: values[-1] for side, values in found.items()}
        progress(seed - given.first, given.rounds, last, "% of the validation digits")
    mean = {side: statistics.mean(values) for side, values in found.items()}
    figures = [Figure(f"{side} (%)", mean[side], measure="%") for side in sides]
    figures += [
        Figure(
            f"points that {side} is less",
            mean["mirrored"] - mean[side],
            TARGET if "1.41" in side else None,
            "<=",
            "points",
        )
        for side in list(sides)[1:]
    ]
    conclude(here, figures, given.json, epochs=given.epochs, accuracies=found)


if __name__ == "__main__":
    main()
