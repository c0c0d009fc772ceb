"""One training step of cats-vs-dogs in one process: our model against the plain torch version."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.common import (
    Figure,
    announce,
    conclude,
    flush_denormals,
    parser,
    positive,
    progress,
)
from benchmarks.jobs.plain import Work, make_work
from benchmarks.jobs.steps import adam, autocast
from spartito.models import CatsVsDogs


def main() -> None:
    """Print the milliseconds per step of both, and their ratio."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=8)
    options.add_argument("--threads", type=positive, default=1)
    options.add_argument("--batch-size", type=positive, default=8)
    options.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    flush_denormals()
    here = announce(f"{__doc__.rstrip('.')}, {given.precision}.")
    work = replace(make_work("xception", world_size=1), local_batch=given.batch_size)
    sides = {
        "ours": stepper(replace(work, model=CatsVsDogs()), given.precision),
        "plain": stepper(work, given.precision),
    }
    found: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(given.rounds):
        for side, step in sides.items():
            step()  # the other side emptied the caches
            began = time.perf_counter()
            step()
            found[side].append((time.perf_counter() - began) * 1e3)
        progress(number, given.rounds, {side: times[-1] for side, times in found.items()}, "ms")
    middle = {side: statistics.median(times) for side, times in found.items()}
    figures = [
        *(Figure(f"{side}, a step", value, measure="ms") for side, value in middle.items()),
        Figure("plain / ours", middle["plain"] / middle["ours"]),
    ]
    conclude(here, figures, given.json, milliseconds_per_step=found)


def stepper(work: Work, precision: str) -> Callable[[], None]:
    """A function that makes one training step on the next batch."""
    optimizer = adam(work.model)
    batches = work.ready(0, 1)
    made = 0

    def step() -> None:
        nonlocal made
        x, y = batches[made % len(batches)]
        made += 1
        optimizer.zero_grad(set_to_none=True)
        with autocast(precision):
            loss = work.loss(work.model(x), y)
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
