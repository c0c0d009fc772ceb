"""Cats-vs-dogs (Xception), 2 workers, local batch 8: Spartito, torch DDP, TensorFlow.

DDP trains the network in three ways: by hand in `channels_last`, the model that Spartito trains,
and in torch's default layout, as one writes it who has not read about layouts. No communication
is the model that Spartito trains, in two processes.
"""

from __future__ import annotations

from benchmarks.common import Figure, announce, conclude, has_bf16, rates
from benchmarks.race import TENSORFLOW, WORKERS, race, race_parser

LOCAL_BATCH = 8
DDP = {"ddp": "", "same": ", the same model", "written": ", torch's default layout"}
AGAINST_DDP = {"fp32": 1.25, "bf16": 1.3}
AGAINST_TENSORFLOW = {"fp32": 1.1, "bf16": 1.4}


def main() -> None:
    """Print the ratios of images per second."""
    assert __doc__ is not None
    title = __doc__.splitlines()[0].rstrip(".")
    options = race_parser(title, rounds=3, windows=3, steps=3)
    options.add_argument("--precision", choices=tuple(AGAINST_DDP), default="fp32")
    given = options.parse_args()
    here = announce(f"{title}, {given.precision}.")
    if given.precision == "bf16" and not has_bf16():
        print("bf16 is emulated on this CPU: slow on all sides, the ratio says little", flush=True)
    windows = race("xception", ("fit", "alone", *DDP), LOCAL_BATCH, given, given.precision)
    speed = rates(windows, LOCAL_BATCH * WORKERS)
    figures = [
        Figure(f"fit / torch DDP{how}", speed["fit"] / speed[side], targets.get(side))
        for targets in [{"ddp": AGAINST_DDP[given.precision]}]
        for side, how in DDP.items()
    ]
    figures.append(Figure("fit / no communication", speed["fit"] / speed["alone"]))
    if TENSORFLOW in speed:
        target = AGAINST_TENSORFLOW[given.precision]
        figures.append(Figure("fit / TensorFlow", speed["fit"] / speed[TENSORFLOW], target))
    conclude(here, figures, given.json, images_per_second=speed, seconds_per_step=windows)


if __name__ == "__main__":
    main()
