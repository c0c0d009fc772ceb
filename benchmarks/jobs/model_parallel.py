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
import tempfile
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
from benchmarks.jobs.peaks import PeakMemory
from benchmarks.jobs.plain import Work
from benchmarks.jobs.steps import EpochClock, Plan, time_windows
from spartito.recipes.gpt import next_character

VOCABULARY = 72
BATCHES = 8
"""Global batches in memory."""
OPTIMIZERS: list[torch.optim.Optimizer] = []
"""Those that train here."""


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


def unmade(*args: Any, **options: Any) -> sp.models.GPT:
    """The GPT of 25 million parameters without values, until a strategy prepares it."""
    with sp.meta():
        return sp.models.GPT.medium(*args, **options)


WORKS: dict[str, Callable[[], Work]] = {
    "gpt": lambda: gpt(sp.models.GPT.small, 32),
    "gpt-25m": lambda: gpt(sp.models.GPT.medium, 8),
    "gpt-25m-meta": lambda: gpt(unmade, 8),
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
    watch = PeakMemory(known) if given.memory else None
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
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True),
            loss=work.loss,
            strategy=chosen,
        )
        OPTIMIZERS.append(trainer.optimizer)
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


def known() -> dict[str, int]:
    """Bytes of what the optimizers have and wait for, in this process and shared."""
    found = {"gradients": 0, "optimizer state": 0}
    for optimizer in OPTIMIZERS:
        for group in optimizer.param_groups:
            grads = [parameter.grad for parameter in group["params"]]
            found["gradients"] += sum(grad.nbytes for grad in grads if grad is not None)
        for values in list(optimizer.state.values()):
            kept = [value for value in list(values.values()) if isinstance(value, torch.Tensor)]
            found["optimizer state"] += sum(value.nbytes for value in kept)
    return found


def everyone(own: dict[str, float]) -> list[dict[str, float]]:
    """What all ranks found; by a file, as the job's port may still be the strategy's."""
    if not dist.is_initialized():
        rank, ranks, port = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        path = Path(tempfile.gettempdir(), f"benchmark-peaks-{os.getppid()}-{port}")
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
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
