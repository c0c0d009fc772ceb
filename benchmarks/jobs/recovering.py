"""An MLP whose workers note when each step begins and ends; it trains until a file says stop."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import spartito as sp

LOCAL_BATCH = 32
FOLDER = Path(sys.argv[1])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


class Noting(sp.Callback):
    """Appends ``process begin|end step time`` to a file of this worker's own."""

    def on_train_begin(self) -> None:
        path = FOLDER / f"worker-{os.environ['RANK']}"
        self._file = path.open("a", buffering=1 << 16)
        self._beat = 0.0
        (FOLDER / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))

    def on_train_batch_begin(self, batch: int) -> None:
        self._note("begin")

    def on_train_batch_end(self, batch: int, logs: object) -> None:
        self._note("end")
        if time.monotonic() - self._beat > 0.05:
            self._beat = time.monotonic()
            self._file.flush()
            self.trainer.stop_training = (FOLDER / "stop").exists()

    def on_train_end(self) -> None:
        self._file.close()

    def _note(self, what: str) -> None:
        self._file.write(f"{os.getpid()} {what} {self.trainer.step} {time.monotonic():.6f}\n")


strategy = sp.strategy()
model = nn.Sequential(
    nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)
trainer = sp.Trainer(
    model,
    optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
    loss=nn.CrossEntropyLoss(),
    metrics=["accuracy"],
    strategy=strategy,
)
torch.manual_seed(0)
x, y = torch.rand(4096, 784), torch.randint(0, 10, (4096,))
trainer.fit(
    (x, y), epochs=10**6, batch_size=LOCAL_BATCH * WORLD_SIZE, callbacks=[Noting()], verbose=False
)
strategy.close()
