"""MLP, 2 workers on one host, local batch 32: Spartito, torch DDP, TensorFlow, no communication."""

from __future__ import annotations

from benchmarks.common import Figure, announce, conclude, rates
from benchmarks.race import TENSORFLOW, WORKERS, race, race_parser

LOCAL_BATCH = 32


def main() -> None:
    """Print the ratios of examples per second."""
    assert __doc__ is not None
    given = race_parser(__doc__, rounds=4, windows=3, steps=300).parse_args()
    here = announce(__doc__)
    windows = race("mlp", ("fit", "ddp", "loop", "alone"), LOCAL_BATCH, given, "fp32")
    speed = rates(windows, LOCAL_BATCH * WORKERS)
    figures = [
        Figure("fit / torch DDP", speed["fit"] / speed["ddp"], 4.0),
        Figure("custom loop / torch DDP", speed["loop"] / speed["ddp"], 4.5),
        Figure("fit / no communication", speed["fit"] / speed["alone"], 0.80),
        Figure("custom loop / no communication", speed["loop"] / speed["alone"], 0.85),
    ]
    if TENSORFLOW in speed:
        figures.append(Figure("fit / TensorFlow", speed["fit"] / speed[TENSORFLOW], 9.0))
    conclude(here, figures, given.json, examples_per_second=speed, seconds_per_step=windows)


if __name__ == "__main__":
    main()
