"""Trains the MLP by `fit` under the strategy that is asked for; measures the rate of the workers.

The chief writes ``windows.json`` into the folder BENCHMARK_FOLDER, and prints it: the seconds
of every window per global batch, which is as many examples as one local batch of each worker.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import pairwise
from pathlib import Path

import torch

import spartito as sp
from benchmarks.common import flush_denormals
from benchmarks.jobs.plain import make_work
from benchmarks.jobs.steps import adam

LIMIT = 120.0
"""Seconds until all workers must have come."""


class Rate(sp.Callback):
    """Cuts one long epoch into windows by the examples that all workers have trained on.

    These are counted where updates are made, so it does not matter which worker did how many.
    """

    def __init__(self, size: int, steps: int) -> None:
        self._size, self._steps = size, steps
        self._began = 0.0
        self._marks: list[tuple[float, float]] = []

    @property
    def windows(self) -> list[float]:
        """Seconds per ``size`` examples: of each window but the first, which warms up."""
        return [
            (time - before) / (batches - done)
            for (before, done), (time, batches) in pairwise(self._marks)
        ]

    def on_epoch_begin(self, epoch: int) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: object) -> None:
        seconds = time.perf_counter() - self._began
        batches = seconds * self.trainer.examples_per_second / self._size
        if batches >= (len(self._marks) + 1) * self._steps:
            self._marks.append((seconds, batches))


def main() -> None:
    """Train so many windows of so many global batches."""
    options = argparse.ArgumentParser()
    options.add_argument("--workers", type=int, required=True)
    options.add_argument("--windows", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    folder = Path(os.environ["BENCHMARK_FOLDER"])
    strategy = sp.strategy()
    work = make_work("mlp", given.workers)
    trainer = sp.Trainer(
        work.model, optimizer=adam(work.model), loss=work.loss, strategy=strategy
    )  # a ps serves here, and goes no further
    meet(folder, str(strategy.task), given.workers)
    size = work.local_batch * given.workers
    rate = Rate(size, given.steps)
    trainer.fit(
        sp.data.arrays(work.x, work.y).batch(size),
        steps_per_epoch=(given.windows + 2) * given.steps,  # at the end some have nothing to do
        callbacks=[rate],
        verbose=False,
    )
    is_chief = strategy.is_chief
    strategy.close()
    if is_chief:
        found = json.dumps(rate.windows[: given.windows])
        (folder / "windows.json").write_text(found)
        print(found, flush=True)


def meet(folder: Path, name: str, count: int) -> None:
    """Go on when ``count`` workers are here: the slowest to start would miss the first windows."""
    (folder / f"{name}.ready").touch()
    end = time.monotonic() + LIMIT
    while len(list(folder.glob("*.ready"))) < count:
        if time.monotonic() > end:
            raise TimeoutError(f"{name} waited {LIMIT:g} s for {count} workers in {folder}")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
