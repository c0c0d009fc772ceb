"""One side of a race between ways to divide a model; all have the same global batch.

mirrored, mesh, sharded   Spartito's `fit`
fsdp2                     torch's fully_shard on gloo, by block
dtensor                   torch's parallelize_module on gloo: heads and hidden units divided

With --memory nothing is timed: what each process has at most, beyond what it had before there was
a model.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import spartito as sp
from benchmarks.common import flush_denormals
from benchmarks.jobs.plain import Work
from benchmarks.jobs.steps import EpochClock, Plan, adam, time_windows
from spartito.recipes.gpt import next_character

VOCABULARY = 72
BATCHES = 8
"""Global batches in memory."""


def gpt(make: Callable[..., sp.models.GPT], batch: int) -> Work:
    """A GPT without dropout, on random characters."""
    model = make(VOCABULARY, dropout=0.0)
    tokens = torch.randint(VOCABULARY, (BATCHES * batch, model.context + 1))
    return Work(model, next_character, tokens[:, :-1], tokens[:, 1:], batch)


def cnn(side: int, batch: int) -> Work:
    """The cats-vs-dogs CNN, on random pictures."""
    x = torch.rand(BATCHES * batch, 3, side, side).mul_(255)
    return Work(
        sp.models.CatsVsDogs(),
        nn.BCEWithLogitsLoss(),
        x.contiguous(memory_format=torch.channels_last),
        torch.rand(len(x), 1).round(),
        batch,
    )


WORKS: dict[str, Callable[[], Work]] = {
    "gpt": lambda: gpt(sp.models.GPT.small, 32),
    "gpt-25m": lambda: gpt(sp.models.GPT.medium, 8),
    "cnn": lambda: cnn(96, 16),
}


def main() -> None:
    """Run the side that the command line names; rank 0 prints."""
    options = argparse.ArgumentParser()
    options.add_argument("side", choices=SIDES)
    options.add_argument("model", choices=WORKS)
    options.add_argument("--windows", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--memory", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    torch.manual_seed(0)
    # What imports and pools of threads need is there before anything counts.
    nn.Linear(8, 8)(torch.zeros(2, 8)).sum().backward()
    watch = PeakMemory() if given.memory else None
    windows = SIDES[given.side](WORKS[given.model](), Plan(given.windows, given.steps, "fp32"))
    found: Any = windows
    if watch is not None:
        found = everyone(watch.end())
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def ours(strategy: str) -> Callable[[Work, Plan], list[float]]:
    """`Trainer.fit` under a strategy."""

    def run(work: Work, plan: Plan) -> list[float]:
        chosen = sp.strategy(strategy)
        trainer = sp.Trainer(
            work.model,
            optimizer=adam(work.model),
            loss=work.loss,
            strategy=chosen,
        )
        clock = EpochClock(plan.steps)
        trainer.fit(
            sp.data.arrays(work.x, work.y).batch(work.local_batch),
            epochs=plan.windows + 1,
            steps_per_epoch=plan.steps,
            callbacks=[clock],
            verbose=False,
        )
        chosen.close()
        return clock.windows[1:]

    return run


def blocks(model: nn.Module) -> Any:
    """The parts that repeat, of both models."""
    return model.blocks


def fsdp2(work: Work, plan: Plan) -> list[float]:
    """Run torch's FSDP2: each block by itself, then the rest; each rank has its own rows."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(work.model):
        fully_shard(block, mesh=mesh)
    fully_shard(work.model, mesh=mesh)
    return _plain(work, plan, dist.get_rank(), dist.get_world_size())


def dtensor(work: Work, plan: Plan) -> list[float]:
    """torch's tensor parallelism; the model must be told how many heads are left to a rank."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    for block in blocks(work.model):
        parallelize_module(
            block,
            mesh,
            {
                **{f"attention.{part}": ColwiseParallel() for part in ("query", "key", "value")},
                "attention.out": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            },
        )
        block.attention.heads //= size
    return _plain(work, plan, 0, 1)


def _plain(work: Work, plan: Plan, rank: int, ranks: int) -> list[float]:
    """The loop by hand, on this rank's rows of each global batch."""
    own = work.local_batch // ranks
    firsts = range(rank * own, len(work.x), work.local_batch)
    batches = cycle([(work.x[at : at + own], work.y[at : at + own]) for at in firsts])
    parameters = list(work.model.parameters())
    kinds = {type(parameter.data) for parameter in parameters}
    # A fused optimizer refuses plain and distributed tensors together.
    optimizers = [
        torch.optim.Adam([p for p in parameters if type(p.data) is kind], lr=1e-3, fused=True)
        for kind in kinds
    ]

    def step() -> None:
        x, y = next(batches)
        work.loss(work.model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return time_windows(step, plan, meet=dist.barrier)


class PeakMemory:
    """The most memory that this process has from now on: resident, and with shared pages divided.

    The kernel keeps the highest resident size; the divided one is looked at every 5 ms.
    """

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS"), _divided()
        self._highest = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def end(self) -> dict[str, float]:
        """MiB beyond the beginning."""
        self._ended.set()
        self._thread.join()
        resident, divided = self._before
        return {
            "resident": (_status("VmHWM") - resident) / 1024,
            "divided": (self._highest - divided) / 1024,
        }

    def _look(self) -> None:
        while not self._ended.wait(0.005):
            self._highest = max(self._highest, _divided())


def _status(name: str) -> int:
    """A line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _divided() -> int:
    """The proportional size, in KiB: a page of two processes counts half in each."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def everyone(own: dict[str, float]) -> list[dict[str, float]]:
    """What all ranks found."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


SIDES: dict[str, Callable[[Work, Plan], list[float]]] = {
    **{name: ours(name) for name in ("mirrored", "mesh", "sharded")},
    "fsdp2": fsdp2,
    "dtensor": dtensor,
}

if __name__ == "__main__":
    main()
