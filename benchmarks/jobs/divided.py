"""One side of a race between ways to divide a GPT over two tasks with a device each.

sharded, mesh, pipeline                    Spartito's; sharded by torch's FSDP2
fully_shard, tensor_parallel, pipelining   torch's own, as its documentation has them

Rank 0 prints the seconds a step, the peak of its device's memory, and the loss of the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import spartito as sp
from benchmarks.common import flush_denormals
from spartito.models.gpt import GPT

TASKS, MICROBATCHES, VOCABULARY = 2, 4, 65
SIZES = {"gpt-25M": (8, 512, 256, 32), "tiny": (2, 32, 16, 8)}
"""Blocks, width, context and the global batch."""
LAYERS = {
    **{f"attention.{part}": ColwiseParallel() for part in ("query", "key", "value")},
    "attention.out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}
"""What torch is told of a block."""
Step = Callable[[], float | Tensor | None]
"""Makes a step; the loss of the whole batch, where this task knows it."""


def main() -> None:
    """Run the side that the command line names."""
    options = argparse.ArgumentParser()
    options.add_argument("side", choices=SIDES)
    options.add_argument("--device", choices=("cuda", "cpu"), required=True)
    options.add_argument("--size", choices=SIZES, required=True)
    options.add_argument("--windows", type=int, default=3)
    options.add_argument("--steps", type=int, default=10)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    side = Side(given.device, *SIZES[given.size])
    step = SIDES[given.side](side)
    first = side.known(step())
    step()  # some sides find something out in the first ones
    seconds = []
    for _ in range(given.windows):
        side.meet()
        began = time.perf_counter()
        for _ in range(given.steps):
            step()
        side.meet()
        seconds.append((time.perf_counter() - began) / given.steps)
    peak = torch.accelerator.max_memory_allocated() / 2**20 if given.device != "cpu" else 0.0
    if side.rank == 0:
        print(json.dumps({"seconds": seconds, "peak": peak, "loss": first}), flush=True)
    side.close()


class Side:
    """What all sides have: the task's device, the same model, the same batch."""

    def __init__(self, kind: str, layers: int, width: int, context: int, batch: int) -> None:
        self.rank, self.device = int(os.environ["RANK"]), torch.device(kind)
        if kind != "cpu":
            self.device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
            torch.accelerator.set_device_index(self.device.index)
        self.batch, self.strategy = batch, None
        self._layers, self._width, self._context = layers, width, context
        torch.manual_seed(0)
        tokens = torch.randint(VOCABULARY, (batch, context + 1))
        self.x, self.y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    strategy: sp.Strategy | None

    def model(self) -> GPT:
        """The same in every task."""
        torch.manual_seed(0)
        return GPT(VOCABULARY, self._context, self._layers, 4, self._width, dropout=0.0)

    def join(self) -> None:
        """Make torch's process group for the device."""
        dist.init_process_group(dist.get_default_backend_for_device(self.device))

    def meet(self) -> None:
        """Wait until all tasks have done what their devices were asked for."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        if self.strategy is None:
            dist.barrier()
        else:
            self.strategy.coordination.tell_all("")

    def known(self, loss: float | Tensor | None) -> float:
        """The loss, which the last task knows."""
        if self.strategy is not None:
            return float(loss or 0.0)
        told: list[Any] = [None] * TASKS
        dist.all_gather_object(told, None if loss is None else float(loss))
        return float(next(each for each in reversed(told) if each is not None))

    def close(self) -> None:
        """Leave the others."""
        if self.strategy is None:
            dist.destroy_process_group()
        else:
            self.strategy.close()


def mean(output: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of all tokens."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def adam(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all sides."""
    return torch.optim.Adam(parameters, 1e-3, fused=True)


def ours(text: str) -> Callable[[Side], Step]:
    """A strategy of ours."""

    def make(side: Side) -> Step:
        side.strategy = strategy = sp.strategy(text, device=side.device.type)
        strategy.prepare(side.model(), adam)
        data = sp.data.arrays(side.x, side.y).batch(side.batch).repeat()
        batches = iter(islice(strategy.distribute(data), 100_000))

        def step() -> float | Tensor:
            found = strategy.step(next(batches), mean)
            return found.loss / found.weight

        return step

    return make


def by_fsdp(side: Side) -> Step:
    """torch's fully_shard: each block by itself, then the rest; each task has its own rows."""
    side.join()
    model = side.model().to(side.device)
    mesh = init_device_mesh(side.device.type, (TASKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rows = slice(side.rank * side.batch // TASKS, (side.rank + 1) * side.batch // TASKS)
    step = plain(side, model, [adam(model.parameters())], rows)

    def whole() -> Tensor:
        loss = step().clone()
        dist.all_reduce(loss)
        return loss / TASKS

    return whole


def by_dtensor(side: Side) -> Step:
    """torch's tensor parallelism; the model must be told how many heads are left to a task."""
    side.join()
    model: Any = side.model().to(side.device)
    mesh = init_device_mesh(side.device.type, (TASKS,))
    for block in model.blocks:
        parallelize_module(block, mesh, LAYERS)
        block.attention.heads //= TASKS
    parameters = list(model.parameters())
    kinds = {type(parameter.data) for parameter in parameters}
    # A fused optimizer refuses plain and distributed tensors together.
    optimizers = [adam([p for p in parameters if type(p.data) is kind]) for kind in kinds]
    return plain(side, model, optimizers, slice(0, side.batch))


def plain(
    side: Side, model: nn.Module, optimizers: list[torch.optim.Optimizer], rows: slice
) -> Callable[[], Tensor]:
    """The loop by hand."""
    x, y = side.x[rows].to(side.device), side.y[rows].to(side.device)

    def step() -> Tensor:
        loss = mean(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


class First(nn.Module):
    """The embedding and half of the blocks."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model, self.blocks = model, model.blocks[: len(model.blocks) // 2]
        del model.blocks, model.norm, model.head

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens to hidden ones."""
        out: Tensor = self.blocks(self.model.embed(tokens))
        return out


def by_pipelining(side: Side) -> Step:
    """torch's 1F1B, cut by hand in the middle; its head is not tied."""
    side.join()
    model = side.model()
    last = nn.Sequential(model.blocks[len(model.blocks) // 2 :], model.norm, model.head)
    half = (First(model) if side.rank == 0 else last).to(side.device)
    optimizer = adam(half.parameters())
    stage = PipelineStage(half, side.rank, TASKS, side.device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mean)
    x, y = side.x.to(side.device), side.y.to(side.device)

    def step() -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if side.rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        return torch.stack(losses).detach().mean() if losses else None

    return step


RACES = {
    "sharded": "fully_shard",
    "mesh": "tensor_parallel",
    "pipeline": "pipelining",
}
"""What of torch's own each strategy is beside."""
SIDES: dict[str, Callable[[Side], Step]] = {
    "sharded": ours('sharded(communication="fsdp", block_bytes=8000000)'),
    "mesh": ours(f"mesh(model={TASKS})"),
    "pipeline": ours(f'pipeline(microbatches={MICROBATCHES}, schedule="1f1b")'),
    "fully_shard": by_fsdp,
    "tensor_parallel": by_dtensor,
    "pipelining": by_pipelining,
}

if __name__ == "__main__":
    main()
