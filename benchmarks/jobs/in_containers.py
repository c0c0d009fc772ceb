"""One side of `benchmarks.containers`: trains the MLP, and prints what worker 0 saw.

fit  Spartito's Trainer.fit with whatever strategy the job has
ddp  torch's DistributedDataParallel on gloo, over the addresses of TF_CONFIG

It imports nothing of the benchmarks: containers see this folder alone.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn

import spartito as sp

LOCAL_BATCH = 32


def main() -> None:
    """Print the seconds per step of every window but the first, and when the first step ended."""
    options = argparse.ArgumentParser()
    options.add_argument("side", choices=("fit", "ddp"))
    options.add_argument("--windows", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    )
    side = fit if given.side == "fit" else ddp
    is_coordinator, windows, first = side(model, given.windows, given.steps)
    if is_coordinator:
        print(json.dumps({"windows": windows, "first": first}), flush=True)
    if given.side == "ddp":
        os._exit(0)  # gloo's threads sometimes keep a process from ending (seen in 4 of 6 runs)


class Clock(sp.Callback):
    """When the first step ended, and the seconds per step of every epoch."""

    def __init__(self, steps: int) -> None:
        self.first = 0.0
        self.windows: list[float] = []
        self._steps = steps
        self._began = 0.0

    def on_train_batch_end(self, batch: int, logs: object) -> None:
        self.first = self.first or time.time()

    def on_epoch_begin(self, epoch: int) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: object) -> None:
        self.windows.append((time.perf_counter() - self._began) / self._steps)


def fit(model: nn.Module, windows: int, steps: int) -> tuple[bool, list[float], float]:
    """`Trainer.fit` over virtual epochs."""
    strategy = sp.strategy()
    clock = Clock(steps)
    batch = LOCAL_BATCH * strategy.num_replicas_in_sync
    trainer = sp.Trainer(
        model, optimizer=adam(model), loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    trainer.fit(
        sp.data.arrays(*examples()).batch(batch),
        epochs=windows + 1,
        steps_per_epoch=steps,
        callbacks=[clock],
        verbose=False,
    )
    strategy.close()
    return strategy.is_chief, clock.windows[1:], clock.first


def ddp(model: nn.Module, windows: int, steps: int) -> tuple[bool, list[float], float]:
    """A bare loop on batches that are ready."""
    config = json.loads(os.environ["TF_CONFIG"])
    workers, rank = config["cluster"]["worker"], config["task"]["index"]
    dist.init_process_group(
        "gloo", init_method=f"tcp://{workers[0]}", rank=rank, world_size=len(workers)
    )
    copy = nn.parallel.DistributedDataParallel(model)
    optimizer, loss_of = adam(model), nn.CrossEntropyLoss()
    x, y = (part[rank :: len(workers)].split(LOCAL_BATCH) for part in examples())
    found, first, step = [], 0.0, 0
    for _ in range(windows + 1):
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss_of(copy(x[step % len(x)]), y[step % len(x)]).backward()
            optimizer.step()
            first = first or time.time()
            step += 1
        found.append((time.perf_counter() - began) / steps)
    dist.barrier()
    return rank == 0, found[1:], first


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    """16,384 made ones."""
    made = torch.Generator().manual_seed(1)
    return torch.randn(16384, 784, generator=made), torch.randint(10, (16384,), generator=made)


def adam(model: nn.Module) -> torch.optim.Adam:
    """The optimizer of both sides."""
    return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


if __name__ == "__main__":
    main()
