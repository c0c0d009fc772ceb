"""`fit` against a hand-written loop: MLP, one device, same metrics, same shuffled gather."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

import spartito as sp
from benchmarks.common import (
    Figure,
    Windows,
    announce,
    conclude,
    flush_denormals,
    parser,
    positive,
    progress,
)
from benchmarks.jobs.plain import Work, make_work
from benchmarks.jobs.steps import adam

SIZES = (32, 64)
TARGET = 1.1


def main() -> None:
    """Print the ratio of examples per second for each batch size."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=9)
    options.add_argument("--steps", type=positive, default=1000, help="steps of an epoch")
    given = options.parse_args()
    here = announce(__doc__)
    torch.set_num_threads(1)
    flush_denormals()
    figures, found = [], {}
    for size in SIZES:
        windows = measure(size, given.rounds, given.steps)
        fit, loop = (statistics.median(seconds) for seconds in windows.values())
        target = None if given.plain else TARGET
        figures.append(Figure(f"fit / hand-written loop, batch {size}", loop / fit, target))
        added = Figure(f"fit adds to a step, batch {size}", (fit - loop) * 1e6, measure="us")
        figures.append(added)
        found[size] = windows
    conclude(here, figures, given.json, seconds_per_step=found)


def measure(size: int, rounds: int, steps: int) -> Windows:
    """Seconds per step of each side; whole epochs take turns in this process."""
    work, ours = make_work("mlp", 2), make_work("mlp", 2)
    rows = torch.arange(steps * size) % len(work.x)
    x, y = work.x[rows], work.y[rows]
    trainer = sp.Trainer(
        ours.model,
        optimizer=adam(ours.model),
        loss=ours.loss,
        metrics=["accuracy"],
        strategy=sp.OneDeviceStrategy(),
    )
    chain = sp.data.arrays(x, y).shuffle().batch(size)
    loop = HandWritten(work, x, y, size)
    sides = {
        "fit": lambda: trainer.fit(chain, epochs=1, verbose=False),
        "loop": loop.epoch,
    }
    windows: Windows = {side: [] for side in sides}
    for number in range(-1, rounds):  # the first warms up
        now = {}
        for side in sides if number % 2 == 0 else reversed(sides):
            began = time.perf_counter()
            sides[side]()
            now[side] = (time.perf_counter() - began) / steps
        if number >= 0:
            for side in sides:
                windows[side].append(now[side])
            speed = {f"{side} of {size}": size / seconds for side, seconds in now.items()}
            progress(number, rounds, speed, "examples/s")
    return windows


class HandWritten:
    """What one writes without a library: an epoch with its loss and accuracy."""

    def __init__(self, work: Work, x: Tensor, y: Tensor, size: int) -> None:
        self._work, self._x, self._y, self._size = work, x, y, size
        self._optimizer = adam(work.model)

    def epoch(self) -> tuple[float, float]:
        """One pass in a new order; returns loss and accuracy."""
        model, loss_fn, optimizer = self._work.model, self._work.loss, self._optimizer
        count, size = len(self._x), self._size
        order = torch.randperm(count)
        total, right = 0.0, 0
        model.train()
        for first in range(0, count, size):
            rows = order[first : first + size]
            x, y = self._x.index_select(0, rows), self._y.index_select(0, rows)
            output = model(x)
            loss = loss_fn(output, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.item() * len(rows)
            right += int((output.detach().argmax(1) == y).sum())
        return total / count, right / count


if __name__ == "__main__":
    main()
