"""Cats-vs-dogs (Xception), 2 workers, local batch 8: Spartito, plain torch DDP, TensorFlow."""

from __future__ import annotations

from benchmarks.common import Figure, announce, conclude, has_bf16, rates
from benchmarks.race import TENSORFLOW, WORKERS, race, race_parser

LOCAL_BATCH = 8
AGAINST_DDP = {"fp32": 1.25, "bf16": 1.3}
AGAINST_TENSORFLOW = {"fp32": 1.1, "bf16": 1.4}


def main() -> None:
    """Print the ratios of images per second."""
    assert __doc__ is not None
    options = race_parser(__doc__, rounds=3, windows=3, steps=3)
    options.add_argument("--precision", choices=tuple(AGAINST_DDP), default="fp32")
    given = options.parse_args()
    here = announce(f"{__doc__.rstrip('.')}, {given.precision}.")
    if given.precision == "bf16" and not has_bf16():
        print("bf16 is emulated on this CPU: slow on all sides, the ratio says little", flush=True)
    windows = race("xception", ("fit", "ddp"), LOCAL_BATCH, given, given.precision)
    speed = rates(windows, LOCAL_BATCH * WORKERS)
    figures = [Figure("fit / torch DDP", speed["fit"] / speed["ddp"], AGAINST_DDP[given.precision])]
    if TENSORFLOW in speed:
        target = AGAINST_TENSORFLOW[given.precision]
        figures.append(Figure("fit / TensorFlow", speed["fit"] / speed[TENSORFLOW], target))
    conclude(here, figures, given.json, images_per_second=speed, seconds_per_step=windows)


if __name__ == "__main__":
    main()
