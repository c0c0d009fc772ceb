"""Eight workers that meet every 500 updates, more than a hundred times: DiLoCo against mirrored.

The main claim of Douillard et al. 2023 (arXiv:2311.08105) at small scale, with as many meetings as
there. It is `benchmarks.diloco` with the weights of the eight side by side in one process
(`benchmarks.jobs.stacked`), which takes a tenth of the time; ``--check`` has both train for a while
and compares their losses.
"""

from __future__ import annotations

import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, announce, conclude, parser, positive, progress
from benchmarks.diloco import LIMIT, WORKERS, picture
from benchmarks.jobs.stacked import Side, begin, train
from benchmarks.launching import run_job
from spartito.system.capacity import available_cores

MIRRORED = "mirrored"
ALIKE = 1e-3
"""By how much losses of the two may differ: they add up in another order."""


def main() -> None:
    """Print the losses after equal updates, and what was sent for them."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=1)
    options.add_argument("--updates", type=positive, default=50_000, help="of each training")
    options.add_argument("--before", type=positive, default=500, help="synchronous ones, for all")
    options.add_argument("--every", type=positive, nargs="+", default=[500])
    options.add_argument("--average", action="store_true", help="groups that average, too")
    options.add_argument("--batch", type=positive, default=8, help="examples of each worker")
    options.add_argument("--looks", type=positive, default=20, help="evaluations on the way")
    options.add_argument("--check", action="store_true", help="compare with real processes")
    options.add_argument("--pictures", type=Path, help="a folder for a drawing, as docs/pictures")
    given = options.parse_args()
    rest = given.updates % max(given.every)
    if rest or given.updates % given.looks or given.updates // given.looks % max(given.every):
        options.error("--updates is a multiple of --looks times the longest --every")
    here = announce(__doc__.splitlines()[0])
    sides = {MIRRORED: Side(1, 0, None)}
    for outer in ("diloco", None) if given.average else ("diloco",):
        for every in given.every:
            sides[f"{outer or 'average'}, H = {every}"] = Side(WORKERS, every, outer)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    look = given.updates // given.looks
    for seed in range(given.rounds):
        weights = begin(given.before, given.batch, WORKERS, seed)
        with ProcessPoolExecutor(available_cores(), get_context("spawn")) as processes:
            batch = given.batch * WORKERS
            under_way = {
                name: processes.submit(train, side, weights, given.updates, look, batch, seed)
                for name, side in sides.items()
            }
            for name, one in under_way.items():
                found[name].append({k: v for k, v in one.result().items() if k != "weights"})
        last = {side: runs[-1]["losses"][-1] for side, runs in found.items()}
        progress(seed, given.rounds, last, "validation loss")
    loss = {name: statistics.mean(one["losses"][-1] for one in found[name]) for name in sides}
    meetings = {name: found[name][0]["meetings"] for name in sides}
    figures = [Figure(f"{side}: loss", value, measure="nats") for side, value in loss.items()]
    for name in sides:
        figures.append(Figure(f"{name}: meetings", meetings[name], measure="meetings"))
        if name != MIRRORED:
            behind = loss[name] - loss[MIRRORED]
            figures.append(Figure(f"{name}: loss beyond mirrored", behind, 0.02, "<=", "nats"))
    if given.check:
        off = compare(sides, given, found)
        figures.append(Figure("loss beside real processes", off, ALIKE, "<=", "nats"))
    if given.pictures:
        runs = {side: one[0]["losses"] for side, one in found.items()}
        picture(given.pictures, runs, look, "diloco-long")
    conclude(here, figures, given.json, updates=given.updates, runs=found)


def compare(sides: dict[str, Side], given: Any, found: dict[str, list[dict[str, Any]]]) -> float:
    """By how much the losses of real processes differ at most, after the same updates."""
    told = {
        name: {"groups": side.groups, "every": side.every, "outer": side.outer}
        if side.every
        else None
        for name, side in sides.items()
    }
    job = ["-m", "benchmarks.jobs.replicated", json.dumps(told)]
    job += ["--before", str(given.before), "--updates", str(given.updates)]
    job += ["--look", str(given.updates // given.looks), "--batch", str(given.batch), "--seed", "0"]
    real = run_job(job, workers=WORKERS, limit=LIMIT)
    return max(
        abs(float(a) - float(b))
        for name in sides
        for a, b in zip(real[name]["losses"], found[name][0]["losses"], strict=True)
    )


if __name__ == "__main__":
    main()
