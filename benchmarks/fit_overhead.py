"""`fit` against a hand-written loop on one device, same metrics, same shuffled gather.

The MLP, or the GPT of the recipe with its clipping and its schedule.
"""

from __future__ import annotations

import math
import statistics
import time

import torch
from torch import Tensor, nn

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
from spartito.recipes import gpt

SIZES = {"mlp": (32, 64), "gpt": (32,)}
STEPS = {"mlp": 1000, "gpt": 50}
TARGETS = {"mlp": 1.1, "gpt": 1.0}
CLIP = {"mlp": None, "gpt": 1.0}
"""The bound of the gradients' norm, where they are clipped."""


def main() -> None:
    """Print the ratio of examples per second for each batch size."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=9)
    options.add_argument("--model", choices=SIZES, default="mlp")
    options.add_argument("--steps", type=positive, help="steps of an epoch")
    given = options.parse_args()
    here = announce(__doc__)
    torch.set_num_threads(1)
    flush_denormals()
    figures, found = [], {}
    for size in SIZES[given.model]:
        windows = measure(given.model, size, given.rounds, given.steps or STEPS[given.model])
        fit, loop = (statistics.median(seconds) for seconds in windows.values())
        target = None if given.plain else TARGETS[given.model]
        figures.append(
            Figure(f"{given.model}: fit / hand-written loop, batch {size}", loop / fit, target)
        )
        added = Figure(
            f"{given.model}: fit adds to a step, batch {size}", (fit - loop) * 1e6, measure="us"
        )
        figures.append(added)
        found[size] = windows
    conclude(here, figures, given.json, seconds_per_step=found)


def measure(model: str, size: int, rounds: int, steps: int) -> Windows:
    """Seconds per step of each side; whole epochs take turns in this process."""
    work, ours = made(model), made(model)
    rows = torch.arange(steps * size) % len(work.x)
    x, y = work.x[rows], work.y[rows]
    trainer = sp.Trainer(
        ours.model,
        optimizer=adam(ours.model),
        loss=ours.loss,
        metrics=["accuracy"] if model == "mlp" else [gpt.accuracy, "perplexity"],
        strategy=sp.OneDeviceStrategy(),
        scheduler=constant if model == "gpt" else None,
        clip_norm=CLIP[model],
    )
    chain = sp.data.arrays(x, y).shuffle().batch(size)
    loop = HandWritten(work, x, y, size, CLIP[model])
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


def made(model: str) -> Work:
    """The model and its data, the same on both sides."""
    if model == "mlp":
        return make_work("mlp", 2)
    x, y = map(torch.stack, zip(*sp.data.characters(), strict=True))
    torch.manual_seed(0)
    return Work(gpt.build(int(x.max()) + 1), gpt.next_character, x, y, 32)


def constant(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule that is stepped, as that of the recipe, and changes nothing."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


class HandWritten:
    """What one writes without a library: an epoch with its loss, accuracy and perplexity."""

    def __init__(self, work: Work, x: Tensor, y: Tensor, size: int, clip: float | None) -> None:
        self._work, self._x, self._y, self._size, self._clip = work, x, y, size, clip
        self._optimizer = adam(work.model)
        self._scheduler = constant(self._optimizer) if clip else None

    def epoch(self) -> tuple[float, float, float]:
        """One pass in a new order; returns loss, accuracy and perplexity."""
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
            if self._clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self._clip)
            optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.item() * len(rows)
            right += int((output.detach().argmax(-1) == y).sum())
        return total / count, right / self._y.numel(), math.exp(total / count)


if __name__ == "__main__":
    main()
