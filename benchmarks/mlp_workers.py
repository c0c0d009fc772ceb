"""MLP, 2 workers on one host, local batch 32: Spartito, torch DDP, TensorFlow, no communication."""

from __future__ import annotations

from benchmarks.common import Figure, announce, conclude, rates
from benchmarks.race import TENSORFLOW, WORKERS, race, race_parser

LOCAL_BATCH = 32
SIDES = {"fit": "mirrored", "loop": "mirrored, custom loop", "central": "central_storage"}
STEPS = {"mlp": 300, "wide": 30}
TARGETS = {
    "mlp": {("fit", "alone"): 0.92, ("central", "alone"): 1.0, ("fit", "ddp"): 2.7},
    "wide": {("fit", "alone"): 0.83, ("central", "alone"): 1.0, ("fit", "ddp"): 1.5},
}
THEIRS = {"alone": "no communication", "ddp": "torch DDP"}
BARE = "a divided update, hand-written / no communication"


def main() -> None:
    """Print the ratios of examples per second."""
    assert __doc__ is not None
    options = race_parser(__doc__, rounds=4, windows=3, steps=0)
    options.add_argument(
        "--model", choices=tuple(TARGETS), default="mlp", help="wide: 10 million parameters"
    )
    given = options.parse_args()
    given.steps = given.steps or STEPS[given.model]
    here = announce(__doc__)
    windows = race(given.model, (*SIDES, "bare", *THEIRS), LOCAL_BATCH, given, "fp32")
    speed = rates(windows, LOCAL_BATCH * WORKERS)
    targets = {} if given.plain else TARGETS[given.model]
    figures = [
        Figure(f"{SIDES[side]} / {THEIRS[other]}", speed[side] / speed[other], target)
        for other in THEIRS
        for side in SIDES
        for target in [targets.get((side, other))]
    ]
    figures.append(Figure(BARE, speed["bare"] / speed["alone"]))
    if TENSORFLOW in speed:
        target = None if given.plain else 9.0
        figures.append(Figure("mirrored / TensorFlow", speed["fit"] / speed[TENSORFLOW], target))
    conclude(here, figures, given.json, examples_per_second=speed, seconds_per_step=windows)


if __name__ == "__main__":
    main()
