"""A task of `benchmarks.lost_task`: trains an MLP and notes when each of its steps ended."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import spartito as sp

ROWS, FEATURES, CLASSES, LOCAL_BATCH = 8192, 784, 10, 32


class Times:
    """Notes the time at which each step of this task ended; callbacks run on the chief alone."""

    def __init__(self, strategy: sp.Strategy) -> None:
        self.ends: list[float] = []
        self._task, self._step = strategy.task, strategy.engine.step
        strategy.engine.step = self.step  # type: ignore[method-assign]

    def step(self, *args: Any, **options: Any) -> Any:
        """As the strategy's own."""
        found = self._step(*args, **options)
        if not self.ends:
            name = f"{self._task.type}-{self._task.index}.began"
            Path(os.environ["BENCHMARK_FOLDER"], name).touch()
        self.ends.append(time.monotonic())
        return found


def main() -> None:
    """Train; leave the times, and on the chief what the servers count."""
    folder, epochs = Path(os.environ["BENCHMARK_FOLDER"]), int(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    strategy = sp.ParameterServerStrategy(servers={"replicas": 2})
    times = Times(strategy)
    task = f"{strategy.task.type}-{strategy.task.index}"
    (folder / f"{task}.pid").write_text(str(os.getpid()))
    model = nn.Sequential(
        nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    trainer = sp.Trainer(model, optimizer=optimizer, loss=nn.CrossEntropyLoss(), strategy=strategy)
    workers = strategy.num_replicas
    data = sp.data.arrays(torch.randn(ROWS, FEATURES), torch.randint(CLASSES, (ROWS,)))
    trainer.fit(data.batch(LOCAL_BATCH * workers), epochs=epochs, verbose=False)
    (folder / f"{task}.json").write_text(json.dumps(times.ends))
    chief = cast(Any, strategy.coordination).chief
    if chief is not None:
        found = chief.progress()
        counts = {"updates": found.version, "work_items": found.work_items, "lost": chief.lost,
                  "expected": ROWS // LOCAL_BATCH * epochs}  # fmt: skip
        (folder / "counts.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
