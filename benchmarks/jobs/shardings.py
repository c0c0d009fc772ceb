"""Trains a model under one way of sharding; rank 0 prints seconds a step, and the job's memory."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import flush_denormals
from spartito.data.batch import Batch

CONTEXT, ROWS, VOCABULARY = 64, 2, 65
SIZES = {"gpt-25M": (8, 512), "gpt-5M": (6, 256)}
"""Blocks and width."""


def main() -> None:
    """Run the windows that the command line asks for."""
    options = argparse.ArgumentParser()
    options.add_argument("side")
    options.add_argument("--size", choices=SIZES, required=True)
    options.add_argument("--windows", type=int, default=3)
    options.add_argument("--steps", type=int, default=3)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    torch.manual_seed(0)
    kind, _, detail = given.side.partition(":")
    make = fsdp2 if kind == "fsdp2" else ours
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # torch imports much for the first optimizer
    before = memory()
    with watching() as watched:
        step, gather = make(kind, detail, given.size)
        step()  # the first one warms up
        step()
    seconds, losses = [], []
    for _ in range(given.windows):
        began = time.perf_counter()
        for _ in range(given.steps):
            losses.append(step())
        seconds.append((time.perf_counter() - began) / given.steps)
    peak = max(*watched, memory()) - before
    if torch.accelerator.is_available():
        peak = torch.accelerator.max_memory_allocated() / 2**20
    found = gather([{"peak": peak, "before": before}, seconds, losses])
    if found is not None:
        print(json.dumps(found), flush=True)


def make_gpt(size: str) -> Gpt:
    """A plain transformer."""
    return Gpt(*SIZES[size])


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Gpt(nn.Module):
    """Predicts the next of `VOCABULARY` characters."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x)).transpose(1, 2)
        return out


def batch_of(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's rows."""
    made = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (ROWS * world, CONTEXT + 1), generator=made)
    rows = rows[rank * ROWS : (rank + 1) * ROWS]
    return rows[:, :-1], rows[:, 1:]


def ours(kind: str, detail: str, size: str) -> tuple[Callable[[], float], Any]:
    """Under a strategy of ours, by its name."""
    from spartito.strategies import strategy as named

    options: dict[str, Any] = dict(part.split("=") for part in detail.split(",") if part)
    strategy = named(kind, **{k: int(v) if v.isdigit() else v for k, v in options.items()})
    model, _ = strategy.prepare(
        make_gpt(size), lambda parameters: torch.optim.Adam(parameters, 1e-3)
    )
    world = strategy.cluster.world_size
    device = next(model.buffers(), next(model.parameters())).device
    x, y = (rows.to(device) for rows in batch_of(strategy.cluster.rank, world))
    offsets = torch.arange(ROWS) + ROWS * strategy.cluster.rank
    batch = Batch((x, y), ROWS, ROWS * world, offsets, 0, 0)

    def step() -> float:
        found = strategy.step(batch, nn.CrossEntropyLoss())
        return float(found.loss / found.weight)

    def gather(mine: Any) -> Any:
        told = strategy.coordination.tell_all(json.dumps(mine))
        return [json.loads(each) for each in told] if strategy.is_chief else None

    return step, gather


def fsdp2(kind: str, backend: str, size: str) -> tuple[Callable[[], float], Any]:
    """Under torch's own, on a backend; "nccl" is that of GPUs."""
    from torch.distributed.fsdp import fully_shard

    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    model = make_gpt(size).to(device)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    x, y = (rows.to(device) for rows in batch_of(dist.get_rank(), dist.get_world_size()))

    def step() -> float:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def gather(mine: Any) -> Any:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        return told if dist.get_rank() == 0 else None

    return step, gather


@contextmanager
def watching() -> Iterator[list[float]]:
    """The memory of this process, every few milliseconds."""
    found, ended = [memory()], threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            found.append(memory())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


def memory() -> float:
    """MiB of this process: its own, and its part of what several have."""
    with open("/proc/self/smaps_rollup") as lines:
        found = {line.split()[0]: line.split()[1] for line in lines if "kB" in line}
    return int(found["Pss:"]) / 1024


if __name__ == "__main__":
    main()
