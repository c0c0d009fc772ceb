"""One process of `benchmarks.step_parts`: the CPU time of each part of a step, in microseconds.

Parts of the code are wrapped from outside; the time of a part leaves out the parts inside it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

import spartito as sp
from benchmarks.common import flush_denormals
from benchmarks.jobs.plain import make_work
from benchmarks.jobs.push_parts import Parts
from benchmarks.jobs.steps import adam
from spartito.collectives.memory.shared_memory import SharedMemoryCollective
from spartito.collectives.memory.slices import Slices
from spartito.data.batch import Batch
from spartito.engine.gradients.gradient_sum import LocalGradients
from spartito.engine.updates import fused_update
from spartito.engine.updates.divided_update import DividedGradients
from spartito.engine.updates.sliced_update import SlicedGradients
from spartito.steps.batches import Placed
from spartito.steps.placements import computation
from spartito.steps.step import Step
from spartito.training.loops import training_loop
from spartito.training.metrics.gathering import MetricSet

SIDES: dict[str, Callable[[], sp.Strategy] | None] = {
    "plain torch": None,
    "one device": sp.OneDeviceStrategy,
    "mirrored": sp.MirroredStrategy,
    "central_storage": sp.CentralStorageStrategy,
}


def wrapped() -> Parts:
    """The parts of a step of `fit`."""
    parts = Parts()
    parts.wrap(training_loop.TrainingLoop, "_train_epoch", "loop: callbacks, progress")
    parts.wrap(training_loop.TrainingLoop, "_came", "loop: counts", counts=True)
    parts.wrap(MetricSet, "update", "metrics")
    parts.wrap(Step, "step", "strategy: around")
    parts.wrap(Step, "enter", "announce the batch")
    parts.wrap(computation, "in_dtype", "to tensors")
    parts.wrap(computation, "forward", "forward")
    parts.wrap(computation, "evaluate_loss", "loss")
    parts.wrap(computation, "backward", "backward")
    parts.wrap(Step, "_update", "update: around")
    for kind in (LocalGradients, SlicedGradients, DividedGradients):
        parts.wrap(kind, "reduce", "reduce: around")
        parts.wrap(kind, "update", "optimizer: around the kernel")
        parts.wrap(kind, "clear", "clear the gradients")
    parts.wrap(SlicedGradients, "_send", "pack, sum, publish, copy")
    parts.wrap(SlicedGradients, "_sum", "pack, sum, publish, copy")
    parts.wrap(SlicedGradients, "_obstacle", "checks: may it be divided")
    parts.wrap(torch, "_foreach_copy_", "pack, sum, publish, copy")
    parts.wrap(torch, "_fused_adam_", "kernel")
    parts.wrap(fused_update.Stepper, "step", "optimizer: around the kernel")
    parts.wrap(SharedMemoryCollective, "synchronize", "meet")
    parts.wrap(SharedMemoryCollective, "exchange_piggybacked", "meet")
    parts.wrap(Slices, "meet", "meet")
    read: Callable[..., Generator[Batch]] = Placed._on_device

    def reading(placed: Any, batches: Iterator[Batch]) -> Generator[Batch]:
        found = read(placed, batches)
        following = parts.timed(lambda: next(found, None), "next(data)")
        while (batch := following()) is not None:
            yield batch

    setattr(Placed, "_on_device", reading)  # noqa: B010 - a method is replaced
    return parts


def plain(steps: int) -> Parts:
    """The same steps in plain torch, with torch's own `Optimizer.step`."""
    work, parts = make_work("mlp", 2), Parts()
    optimizer, batches = adam(work.model), work.ready(0, 2)
    forward, loss = parts.timed(work.model, "forward"), parts.timed(work.loss, "loss")
    backward = parts.timed(torch.Tensor.backward, "backward")
    parts.wrap(torch, "_fused_adam_", "kernel")
    step = parts.timed(optimizer.step, "optimizer: around the kernel")
    clear = parts.timed(optimizer.zero_grad, "clear the gradients", counts=True)
    for number in range(steps + 300):
        x, y = batches[number % len(batches)]
        backward(loss(forward(x), y))
        step()
        clear()
    return parts


def main() -> None:
    """Train as one side, and print where the time went."""
    options = argparse.ArgumentParser()
    options.add_argument("side", choices=SIDES)
    options.add_argument("--steps", type=int, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    kind = SIDES[given.side]
    if kind is None:
        parts = plain(given.steps)
    else:
        work, parts, strategy = make_work("mlp", 2), wrapped(), kind()
        sp.Trainer(work.model, optimizer=adam(work.model), loss=work.loss, strategy=strategy).fit(
            sp.data.arrays(work.x, work.y).batch(32 * strategy.num_replicas_in_sync),
            steps_per_epoch=given.steps + 300,
            verbose=False,
        )
        strategy.close()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(parts.figures()), flush=True)


if __name__ == "__main__":
    main()
