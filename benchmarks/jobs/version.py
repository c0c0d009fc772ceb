"""One turn of `benchmarks.versions`: seconds per step of `fit` or of a loop, as a line of JSON.

It imports nothing of the benchmarks, so that it runs with the sources of any version.
"""

import argparse
import json
import time
from typing import Any

import torch
from torch import nn

import spartito as sp

ROWS = 64


def main() -> None:
    """Train the MLP in windows of equal length; the chief prints the seconds per step of each."""
    options = argparse.ArgumentParser()
    options.add_argument("kind", choices=("fit", "loop"))
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--windows", type=int, default=3)
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    strategy = sp.strategy()
    net = nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=True)
    count = ROWS * given.steps
    data = sp.data.arrays(torch.rand(8192, 784), torch.randint(10, (8192,))).shuffle()
    data = data.batch(ROWS).repeat()
    windows = (fit if given.kind == "fit" else loop)(strategy, net, optimizer, data, given)
    if strategy.is_chief:
        print(json.dumps({"seconds_per_step": windows, "examples": count}), flush=True)
    strategy.close()


def fit(strategy: Any, net: Any, optimizer: Any, data: Any, given: Any) -> list[float]:
    """Seconds per step of each window; the first warms up."""
    trainer = sp.Trainer(
        net,
        optimizer=optimizer,
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=strategy,
    )
    windows = []
    for _ in range(given.windows + 1):
        began = time.perf_counter()
        trainer.fit(data, epochs=1, steps_per_epoch=given.steps, verbose=False)
        windows.append((time.perf_counter() - began) / given.steps)
    return windows[1:]


def loop(strategy: Any, net: Any, optimizer: Any, data: Any, given: Any) -> list[float]:
    """The same in a loop of one's own."""
    net, optimizer = strategy.prepare(net, optimizer)
    loss_fn = nn.CrossEntropyLoss()
    batches = iter(strategy.distribute(data))
    windows = []
    for _ in range(given.windows + 1):
        began = time.perf_counter()
        for _ in range(given.steps):
            batch = next(batches)
            strategy.backward(loss_fn(net(batch.x), batch.y), batch)
            strategy.update(optimizer)
        windows.append((time.perf_counter() - began) / given.steps)
    return windows[1:]


if __name__ == "__main__":
    main()
