"""One replica of a job that shows where a strategy keeps its parameters.

memory   trains a large network, and prints what each replica holds
speed    trains the MLP, and prints the seconds per step of every window
numbers  trains the MLP in float64, and saves its weights as ``<strategy>.pt``
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from benchmarks.common import flush_denormals
from benchmarks.jobs.losses import STEPS, Losses, digits
from benchmarks.jobs.plain import make_work
from benchmarks.jobs.steps import Plan, adam, time_windows
from spartito.data.batch import Batch

WIDTH, LAYERS, ROWS = 3584, 4, 8
"""Four layers of 12.8 million parameters; examples per replica, few, so that they weigh nothing."""


def main() -> None:
    """Do what the command line names; rank 0 prints."""
    options = argparse.ArgumentParser()
    options.add_argument("what", choices=("memory", "speed", "numbers"))
    options.add_argument("strategy")
    options.add_argument("--windows", type=int, default=3)
    options.add_argument("--steps", type=int, default=5)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    if given.what == "memory":
        found: Any = memory(given.strategy, given.steps)
    elif given.what == "speed":
        found = speed(given.strategy, Plan(given.windows, given.steps, "fp32"))
    else:
        found = numbers(given.strategy)
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


def memory(name: str, steps: int) -> dict[str, Any]:
    """Bytes per replica: what training adds, at most, and what parameters and state make."""
    strategy = sp.strategy(name)
    torch.manual_seed(0)
    x = torch.rand(ROWS * strategy.num_replicas_in_sync, WIDTH)
    y = torch.zeros(len(x), dtype=torch.long)
    before = proportional()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    batches = endless(strategy, model, x, y, len(x))
    most = max(proportional() for _ in range(steps) for _ in range(next(batches)))
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    added = strategy.gather(torch.tensor([most - before]))
    strategy.close()
    return {"added": added.tolist(), "parameters": parameters, "state": 2 * parameters}


def speed(name: str, plan: Plan) -> list[float]:
    """Seconds per step, in a loop of the user's own."""
    strategy = sp.strategy(name)
    work = make_work("mlp", strategy.num_replicas_in_sync)
    size = work.local_batch * strategy.num_replicas_in_sync
    batches = endless(strategy, work.model, work.x, work.y, size)

    def step() -> None:
        next(batches)
        next(batches)

    found = time_windows(step, plan, meet=lambda: None)
    strategy.close()
    return found


def numbers(name: str) -> list[float]:
    """The loss of every step."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    strategy = sp.strategy(name)
    model, loss, train, _ = digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = sp.Trainer(
        model, optimizer=optimizer, loss=loss, strategy=strategy, deterministic=True
    )
    losses = Losses()
    trainer.fit(train, epochs=STEPS // len(train), callbacks=[losses], verbose=False)
    weights = strategy.state_dict()["model"]
    if strategy.is_chief:
        torch.save(weights, Path(os.environ["BENCHMARK_FOLDER"], f"{name}.pt"))
    strategy.close()
    return losses.values


def endless(
    strategy: sp.Strategy, model: nn.Module, x: Tensor, y: Tensor, size: int
) -> Iterator[int]:
    """Training without end: a stop after every backward pass, and one after every update."""
    net, optimizer = strategy.prepare(model, adam(model))
    batch: Batch
    for batch in strategy.distribute(sp.data.arrays(x, y).batch(size).repeat()):
        strategy.backward(nn.functional.cross_entropy(net(batch.x), batch.y), batch)
        yield 1
        strategy.update(optimizer)
        yield 1


def proportional() -> int:
    """Bytes of this process: its own pages, and its part of those that several have mapped."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/smaps_rollup has no line Pss")


if __name__ == "__main__":
    main()
