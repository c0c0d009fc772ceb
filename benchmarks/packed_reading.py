"""Examples per second from packed files on this disk, in shuffled order, to batches of 64."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.common import Figure, announce, conclude, interpreter, parser, positive, progress
from benchmarks.photos import make_photos

OURS = ("parquet", "mds", "webdataset")
OTHERS = {"mds": "MosaicML Streaming", "litdata": "LitData", "webdataset": "WebDataset",
          "datasets": "datasets"}  # fmt: skip
SIDE = 180
LENGTH = 1024


def main() -> None:
    """Print examples/s of every side, and how many times the others' ours reaches."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    options.add_argument("--data", type=Path, help="photos to scale, one folder per class")
    options.add_argument("--photos", type=positive, default=2000, help="how many")
    options.add_argument("--rows", type=positive, default=20_000, help="of tokens, how many")
    options.add_argument("--seconds", type=float, default=3.0, help="of one side, at least")
    options.add_argument(
        "--others", metavar="PYTHON", type=interpreter,
        help="a Python with mosaicml-streaming, litdata, webdataset and datasets",
    )  # fmt: skip
    given = options.parse_args()
    here = announce(__doc__)
    if given.others is None:
        print("others: left out, as --others PYTHON names none")
    sides = {f"spartito {name}": (sys.executable, 0) for name in OURS}
    for name in OTHERS if given.others else ():
        sides |= {f"{name}, {workers} workers": (given.others, workers) for workers in (0, 2)}
    figures: list[Figure] = []
    windows: dict[str, dict[str, list[float]]] = {}
    for kind in ("tokens", "images"):
        with tempfile.TemporaryDirectory() as top:
            folder = Path(top)
            prepare(kind, folder, given)
            for name in ("parquet", *(OTHERS if given.others else ("webdataset",))):
                python = sys.executable if name in ("parquet", "webdataset") else given.others
                call(python, "write", name, kind, str(folder))
            found: dict[str, list[float]] = {}
            for number in range(given.rounds):
                order = list(sides) if number % 2 == 0 else list(sides)[::-1]
                for side in order:
                    python, workers = sides[side]
                    name = side.partition(",")[0]
                    if not (folder / name.removeprefix("spartito ")).exists():
                        continue
                    told = call(
                        python, "read", name, kind, str(folder), f"--seconds={given.seconds}",
                        f"--workers={workers}",
                    )  # fmt: skip
                    found.setdefault(side, []).append(json.loads(told)["rate"])
                medians = {side: statistics.median(rates) for side, rates in found.items()}
                progress(number, given.rounds, medians, f"{kind}/s")
            figures += summarize(kind, found)
            windows[kind] = found
    conclude(here, figures, given.json, examples_per_second=windows)


def prepare(kind: str, folder: Path, given: argparse.Namespace) -> None:
    """What is packed: photos of 180x180 as JPEG, or rows of tokens."""
    count = given.rows if kind == "tokens" else given.photos
    if kind == "tokens":
        rows = np.random.default_rng(0).integers(0, 50_000, (count, LENGTH), dtype=np.int32)
        np.save(folder / "raw.npy", rows)
        return
    make_photos(folder / "photos", count, given.data, (SIDE, SIDE))
    (folder / "raw").mkdir()
    for number, file in enumerate(sorted((folder / "photos").rglob("*.jpg"))):
        with Image.open(file) as image:
            assert image.size == (SIDE, SIDE)
        file.rename(folder / "raw" / f"{number:06d}.jpg")


def call(python: str, *words: str) -> str:
    """The last line that a job prints."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-m", "benchmarks.jobs.readers", *words], env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stderr[-2000:]}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def summarize(kind: str, found: dict[str, list[float]]) -> list[Figure]:
    """Examples per second of all sides, and ratios, medians over rounds."""
    speed = {side: statistics.median(rates) for side, rates in found.items()}
    figures = [
        Figure(f"{kind}: {side}", rate, measure="examples/s") for side, rate in speed.items()
    ]
    ours = max(rate for side, rate in speed.items() if side.startswith("spartito"))
    for name, title in OTHERS.items():
        theirs = [rate for side, rate in speed.items() if side.startswith(f"{name},")]
        if theirs:
            figures.append(Figure(f"{kind}: spartito / {title}", ours / max(theirs), 1.0))
    return figures


if __name__ == "__main__":
    main()
