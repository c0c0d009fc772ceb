"""A training that is saved in the middle of an epoch, and the same by plain torch."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import nn

import spartito as sp
from tests.strategies.jobs import CLASSES, blobs, make_strategy, mlp

EXAMPLES, BATCH, EPOCHS = 46, 8, 2  # the last batch of an epoch has six examples


def figures(
    name: str,
    options: dict[str, Any],
    path: str,
    at: int,
    accumulate: int = 1,
    weighted: bool = False,
) -> dict[str, list[float]]:
    """Loss and accuracy of a training that is saved after ``at`` batches; 0: goes on from there.

    A ``weighted`` mean is of weights that nobody knows before the batches have come.
    """
    strategy = make_strategy(name, **options)
    net = mlp()
    loss = nn.CrossEntropyLoss(torch.linspace(0.5, 2, CLASSES).double() if weighted else None)
    trainer = sp.Trainer(
        net, optimizer=torch.optim.AdamW(net.parameters(), 0.02), loss=loss,
        metrics=["accuracy"], strategy=strategy, accumulate=accumulate,
    )  # fmt: skip

    class Save(sp.Callback):
        batches = 0

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.batches += 1
            if self.batches == at:
                trainer.save(path)

    if not at:
        trainer.load(path)
    data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
    history = trainer.fit(data, epochs=EPOCHS, callbacks=[Save()], verbose=0).history
    strategy.close()
    return {name: history[name] for name in ("loss", "accuracy")}


def interrupted(name: str, options: dict[str, Any], path: str, at: int) -> dict[str, list[float]]:
    """As `figures`, of a task that is told to end after ``at`` batches, and saves then."""
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(
        net, optimizer=torch.optim.AdamW(net.parameters(), 0.02), loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"], strategy=strategy,
    )  # fmt: skip

    class Tell(sp.Callback):
        batches = 0

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.batches += 1
            if self.batches == at:
                os.kill(os.getpid(), signal.SIGTERM)

    data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
    backup = sp.callbacks.BackupAndRestore(path, every=100, share=None)
    try:
        history = trainer.fit(data, epochs=EPOCHS, callbacks=[Tell(), backup], verbose=0).history
    except sp.PreemptedError:
        return {}
    finally:
        strategy.close()
    return {name: history[name] for name in ("loss", "accuracy")}


def by_torch(accumulate: int) -> dict[str, list[float]]:
    """The same on one device."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), 0.02)
    x, y = blobs(EXAMPLES)
    found: dict[str, list[float]] = {"loss": [], "accuracy": []}
    for _ in range(EPOCHS):
        loss, right = 0.0, 0
        for first in range(0, EXAMPLES, BATCH * accumulate):
            rows = slice(first, first + BATCH * accumulate)
            optimizer.zero_grad()
            output = net(x[rows])
            mean = nn.functional.cross_entropy(output, y[rows])
            mean.backward()
            optimizer.step()
            loss += mean.item() * len(output)
            right += int((output.argmax(1) == y[rows]).sum())
        found["loss"].append(loss / EXAMPLES)
        found["accuracy"].append(right / EXAMPLES)
    return found
