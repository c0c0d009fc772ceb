"""A task of `benchmarks.decoupled`: trains on the digits and notes when each step ended."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spartito as sp

BATCH = 96


def main() -> None:
    """Train; leave the times of the steps within epochs, and on the chief the history."""
    folder, epochs, seed = Path(os.environ["BENCHMARK_FOLDER"]), int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    strategy = sp.strategy()
    times: list[float] = []
    task = f"{strategy.task.type}-{strategy.task.index}"
    (folder / f"{task}.pid").write_text(str(os.getpid()))
    own = strategy.engine.step

    def step(*args: Any, **options: Any) -> Any:
        """As the strategy's own; callbacks run on the chief alone."""
        found = own(*args, **options)
        times.append(time.monotonic())
        if len(times) == 1:  # a file for each process that was this task
            (folder / f"{task}.{os.getpid()}.first").write_text(str(times[0]))
            (folder / f"{task}.began").touch()
        return found

    strategy.engine.step = step  # type: ignore[method-assign]
    net = sp.models.MnistMLP()
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.Adam(net.parameters(), 1e-3),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        seed=seed,
    )
    history = trainer.fit(
        sp.data.digits("training").shuffle().batch(BATCH),
        epochs=epochs,
        validation_data=sp.data.digits("validation").batch(500),
        verbose=False,
    )
    (folder / f"{task}.json").write_text(json.dumps(times))
    if strategy.is_chief:
        (folder / "history.json").write_text(json.dumps(history.history))
    strategy.close()


if __name__ == "__main__":
    main()
