"""Eight workers that meet every 20, 100 or 500 updates: a small GPT, DiLoCo against mirrored.

The main claim of Douillard et al. 2023 (arXiv:2311.08105) at small scale: inner AdamW, outer
Nesterov 0.7 / 0.9, all from the weights of a short synchronous training. Real processes.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, announce, conclude, parser, positive, progress
from benchmarks.launching import run_job

WORKERS = 8
EVERY = (20, 100, 500)
LIMIT = 1800.0


def main() -> None:
    """Print the mean perplexities over the seeds, what was sent for them, and draw the curves."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=1)
    options.add_argument("--updates", type=positive, default=5000, help="of each training")
    options.add_argument("--before", type=positive, default=500, help="synchronous ones, for all")
    options.add_argument("--every", type=positive, nargs="+", default=EVERY)
    options.add_argument("--batch", type=positive, default=8, help="examples of each worker")
    options.add_argument("--pictures", type=Path, help="a folder for a drawing, as docs/pictures")
    given = options.parse_args()
    look = max(given.every)
    if given.updates % look:
        options.error(f"--updates is a multiple of {look}, the longest time between meetings")
    here = announce(__doc__.splitlines()[0])
    sides: dict[str, dict[str, Any] | None] = {"mirrored": None}
    for outer in ("diloco", None):
        for every in given.every:
            name = f"{outer or 'average'}, H = {every}"
            sides[name] = {"groups": WORKERS, "every": every, "outer": outer}
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for seed in range(given.rounds):
        job = ["-m", "benchmarks.jobs.replicated", json.dumps(sides)]
        job += ["--before", str(given.before), "--updates", str(given.updates)]
        job += ["--look", str(look), "--batch", str(given.batch), "--seed", str(seed)]
        for side, one in run_job(job, workers=WORKERS, limit=LIMIT).items():
            found[side].append(one)
        last = {side: runs[-1]["losses"][-1] for side, runs in found.items()}
        progress(seed, given.rounds, last, "validation loss")
    loss = {
        side: statistics.mean(run["losses"][-1] for run in runs) for side, runs in found.items()
    }
    meetings = {side: runs[0]["meetings"] for side, runs in found.items()}
    figures = [Figure(f"{side}: loss", value, measure="nats") for side, value in loss.items()]
    figures += [
        Figure(f"{side}: meetings of mirrored for one", meetings["mirrored"] / count)
        for side, count in meetings.items()
    ]
    if given.pictures:
        picture(given.pictures, {side: runs[0]["losses"] for side, runs in found.items()}, look)
    conclude(here, figures, given.json, updates=given.updates, runs=found)


def picture(folder: Path, losses: dict[str, list[float]], look: int, name: str = "diloco") -> None:
    """Draw the validation losses of the first seed over updates."""
    from benchmarks.study_results import Curve, draw

    colours = ("#26282b", "#2b6ca3", "#5f93c0", "#9dbfdc", "#bf5f12", "#d58a4c", "#e9bd97")
    lines = [
        Curve(
            side,
            [look * (number + 1) for number in range(len(values))],
            values,
            paint,
            faint=side.startswith("average"),
        )
        for (side, values), paint in zip(losses.items(), colours * len(losses), strict=False)
    ]
    title = "A small GPT, 8 workers: validation loss"
    draw(folder / f"{name}.svg", title, "updates", "loss", lines)


if __name__ == "__main__":
    main()
