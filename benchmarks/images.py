"""Images per second from folders of JPEG files to batches of 32 of 180x180, float32."""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.common import Figure, announce, conclude, interpreter, parser, positive, progress
from benchmarks.launching import run_job
from benchmarks.photos import make_photos

SIZES = ((500, 375), (1600, 1200))
OTHERS = {
    "torch": ("torch, 0 workers", "torch, 2 workers"),
    "torch at reduced scale": ("torch, 2 workers, reduced scale",),
    "tf.data": ("tensorflow",),
    "tf.data at reduced scale": ("tensorflow, reduced scale",),
    "grain": ("grain",),
}
"""The sides that decode as `spartito` does; of several the fastest counts."""

Rates = dict[str, dict[str, list[float]]]
"""Images per second of each round, by size and side."""


def main() -> None:
    """Print images/s of every side, and how many times the others' `image_folder` reaches."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    options.add_argument("--data", type=Path, help="photos to enlarge, one folder per class")
    options.add_argument("--photos", type=positive, default=256, help="how many files of a size")
    options.add_argument("--seconds", type=float, default=1.0, help="of one side, at least")
    options.add_argument(
        "--tensorflow", metavar="PYTHON", type=interpreter, help="a Python with TensorFlow"
    )
    options.add_argument(
        "--grain", metavar="PYTHON", type=interpreter, help="a Python with grain and Pillow"
    )
    given = options.parse_args()
    here = announce(__doc__)
    pythons = {"spartito": sys.executable, "torch": sys.executable}
    for name in ("tensorflow", "grain"):
        python = getattr(given, name)
        if python is None:
            print(f"{name}: left out, as --{name} PYTHON names none")
        else:
            pythons[name] = python
    found: Rates = {}
    with tempfile.TemporaryDirectory() as top:
        folders = [Path(top, f"{width}x{height}") for width, height in SIZES]
        for folder, size in zip(folders, SIZES, strict=True):
            make_photos(folder, given.photos, given.data, size)
        for number in range(given.rounds):
            order = list(pythons) if number % 2 == 0 else list(pythons)[::-1]
            for name in order:
                words = ["-m", "benchmarks.jobs.images", name, *map(str, folders)]
                told = run_job(
                    [*words, f"--seconds={given.seconds}"],
                    workers=1,
                    python=pythons[name],
                    env={"TF_CPP_MIN_LOG_LEVEL": "3"},
                )
                for size_name, sides in told.items():
                    for side, rate in sides.items():
                        found.setdefault(size_name, {}).setdefault(side, []).append(rate)
            medians = {side: statistics.median(r) for side, r in found["500x375"].items()}
            progress(number, given.rounds, medians, "images/s at 500x375")
    figures = [figure for size_name in found for figure in summarize(size_name, found[size_name])]
    conclude(here, figures, given.json, images_per_second=found)


def summarize(size: str, found: dict[str, list[float]]) -> list[Figure]:
    """Images per second of all sides, and ratios, medians over rounds."""
    speed = {side: statistics.median(rates) for side, rates in found.items()}
    figures = [Figure(f"{size}: {side}", rate, measure="images/s") for side, rate in speed.items()]
    for name, sides in OTHERS.items():
        theirs = [speed[side] for side in sides if side in speed]
        if theirs:
            figures.append(Figure(f"{size}: spartito / {name}", speed["spartito"] / max(theirs)))
    for side in ("spartito", "tensorflow, memory"):
        if side in speed:
            name = "no cache" if side == "spartito" else "tf.data's cache"
            ratio = speed["spartito, memory"] / speed[side]
            figures.append(Figure(f"{size}: spartito, memory / {name}", ratio))
    return figures


if __name__ == "__main__":
    main()
