"""A task of `benchmarks.lost_task`: trains an MLP and notes when each of its steps ended."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn

import spartito as sp
from spartito.steps.parameter_server import ParameterServerStep

ROWS, FEATURES, CLASSES, LOCAL_BATCH = 8192, 784, 10, 32


class TimedStep(ParameterServerStep):
    """Notes the time at which each step of this task ended; callbacks run on the chief alone."""

    times: ClassVar[list[float]] = []

    def step(self, *args: Any, **options: Any) -> Any:
        """As the strategy's own."""
        found = super().step(*args, **options)
        if not self.times:
            name = f"{self.task.type}-{self.task.index}.began"
            Path(os.environ["BENCHMARK_FOLDER"], name).touch()
        self.times.append(time.monotonic())
        return found


@dataclass(frozen=True, eq=False)
class Timed(sp.ParameterServerStrategy):
    """Workers and servers, whose steps are timed."""

    implementation = "lost_task:TimedStep"


def main() -> None:
    """Train; leave the times, and on the chief what the servers count."""
    folder, epochs = Path(os.environ["BENCHMARK_FOLDER"]), int(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    strategy = Timed(replicas=2)
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
    (folder / f"{task}.json").write_text(json.dumps(TimedStep.times))
    chief = cast(Any, strategy.coordination).chief
    if chief is not None:
        found = chief.progress()
        counts = {"updates": found.version, "work_items": found.work_items, "lost": chief.lost,
                  "expected": ROWS // LOCAL_BATCH * epochs}  # fmt: skip
        (folder / "counts.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
