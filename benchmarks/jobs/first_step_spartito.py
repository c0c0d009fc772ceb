"""A short script on Spartito that notes when its first step is done."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import spartito as sp


class FirstStep(sp.Callback):
    """Writes the time into a file of this process's own."""

    def on_train_batch_end(self, batch: int, logs: object) -> None:
        Path(sys.argv[1], os.environ["RANK"]).write_text(str(time.time()))


strategy = sp.strategy()
model = nn.Sequential(
    nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)
trainer = sp.Trainer(
    model,
    optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
    loss=nn.CrossEntropyLoss(),
    strategy=strategy,
)
torch.manual_seed(0)  # all tasks make the same data
x, y = torch.rand(64, 784), torch.randint(0, 10, (64,))
trainer.fit((x, y), batch_size=64, callbacks=[FirstStep()], verbose=False)
strategy.close()
