"""Times steps of a pipeline, of one process with the same microbatches, and of torch's pipelining.

All in the same two processes, in turns, on a small GPT. As one process each of them trains a model
of its own, both at once, so every side has both cores busy. Losses of all sides are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import spartito as sp
from benchmarks.common import flush_denormals
from spartito.models.gpt import GPT
from spartito.pipeline.schedules import Action, Order, Shape, Span, bubble, orders, simulate
from spartito.strategies import PipelineStrategy

VOCABULARY, LAYERS, WIDTH, CONTEXT, BATCH = 65, 8, 128, 128, 32
Step = Callable[[], float | None]
"""Makes a step; the loss where this process has it."""


def main() -> None:
    """Run windows of all sides; rank 0 prints their seconds per step."""
    options = argparse.ArgumentParser()
    options.add_argument("schedule")
    options.add_argument("--windows", type=int, required=True)
    options.add_argument("--microbatches", type=int, required=True)
    options.add_argument("--port", type=int, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    strategy = PipelineStrategy(microbatches=given.microbatches, schedule=given.schedule)
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{given.port}", rank=rank, world_size=size
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT))
    target = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    sides: dict[str, Step] = {
        "pipeline": ours(strategy, tokens, target),
        "one process": alone(tokens, target, given.microbatches),
    }
    if given.schedule == "1f1b":
        sides["torch"] = torchs(rank, size, tokens, target, given.microbatches)
    found: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float | None]] = {name: [] for name in sides}
    actions: list[list[Span]] = []
    for window in range(given.windows + 1):
        for name in sides if window % 2 == 0 else reversed(list(sides)):
            dist.barrier()
            began = time.perf_counter()
            losses[name].append(sides[name]())
            dist.barrier()
            if window:
                found[name].append(time.perf_counter() - began)
            if window and name == "pipeline":
                engine: Any = strategy.engine
                all_ = engine.computation.passes.values()
                actions.append([span for passes in all_ for span in passes.spans])
    compare(losses)
    every: list[Any] = [None] * size
    dist.all_gather_object(every, actions)
    if rank == 0:
        shape = Shape(size, 1, given.microbatches)
        told = {
            "bound": bubble(given.schedule, shape),
            "actions": measured(orders(given.schedule, shape), [*chain(*every)]),
            "busy": sum(span.end - span.start for spans in every for own in spans for span in own),
        }
        told["busy"] /= size * given.windows
        print(json.dumps({**found, **told}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    strategy.close()


def measured(found: tuple[Order, ...], steps: list[list[Span]]) -> float:
    """Seconds of a step whose actions take what they took, and whose messages take no time."""
    times: dict[Action, list[float]] = {}
    for step in steps:
        for span in step:
            times.setdefault(span.action, []).append(span.end - span.start)
    ran = simulate(found, lambda action: statistics.median(times[action]))
    return max(span.end for own in ran for span in own)


def compare(losses: dict[str, list[float | None]]) -> None:
    """End the benchmark where a side does not train the same model."""
    alone = losses["one process"]
    for name, own in losses.items():
        compared = 1 if name == "torch" else len(own)  # its head learns by itself
        for step, (loss, right) in enumerate(zip(own[:compared], alone, strict=False)):
            if loss is not None and right is not None and abs(loss / right - 1) > 1e-3:
                sys.exit(f"{name}: the loss of step {step} is {loss}, and of one process {right}")


def net() -> GPT:
    """The same model in every process."""
    torch.manual_seed(0)
    return GPT(VOCABULARY, CONTEXT, LAYERS, 4, WIDTH, dropout=0.0)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def adam(parameters: object) -> torch.optim.Optimizer:
    """All sides have it."""
    return torch.optim.Adam(parameters, 1e-3, fused=True)  # type: ignore[arg-type]


def ours(strategy: sp.Strategy, tokens: Tensor, target: Tensor) -> Step:
    """A step of the strategy."""
    strategy.prepare(net(), adam)
    batches = strategy.distribute(sp.data.arrays(tokens, target).batch(BATCH))

    def step() -> float:
        (result,) = [strategy.step(batch, loss) for batch in batches]
        return float(result.loss) / float(result.weight)

    return step


def alone(tokens: Tensor, target: Tensor, microbatches: int) -> Step:
    """A step in plain torch, with the same microbatches accumulated."""
    model = net()
    optimizer = adam(model.parameters())

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(tokens.chunk(microbatches), target.chunk(microbatches), strict=True):
            part = loss(model(x), y) / microbatches
            part.backward()
            total += part.item()
        optimizer.step()
        return total

    return step


class First(nn.Module):
    """The embedding and half of the blocks."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model, self.blocks = model, model.blocks[: LAYERS // 2]
        del model.blocks, model.norm, model.head

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens to hidden ones."""
        out: Tensor = self.blocks(self.model.embed(tokens))
        return out


def torchs(rank: int, size: int, tokens: Tensor, target: Tensor, microbatches: int) -> Step:
    """torch's own 1F1B on gloo, cut by hand in the middle; its head is not tied."""
    model = net()
    last = nn.Sequential(model.blocks[LAYERS // 2 :], model.norm, model.head)
    half = First(model) if rank == 0 else last
    optimizer = adam(half.parameters())
    stage = PipelineStage(half, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss)

    def step() -> float | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=target, losses=losses)
        optimizer.step()
        return torch.stack(losses).mean().item() if losses else None

    return step


if __name__ == "__main__":
    main()
