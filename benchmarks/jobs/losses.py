"""Trains 30 deterministic steps in float64, and prints the loss of every step."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping

import torch
from torch import nn

import spartito as sp
from benchmarks.jobs.plain import mlp
from spartito.data.dataset import Dataset

STEPS = 30


class Losses(sp.Callback):
    """The exact loss of each global step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        self.values.append(logs["loss"])


def main() -> None:
    """Train the model named on the command line under as many replicas as there are."""
    options = argparse.ArgumentParser()
    options.add_argument("model", choices=("mlp", "cats_vs_dogs"))
    options.add_argument("--size", type=int, default=180)
    given = options.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    alone = os.environ["WORLD_SIZE"] == "1"
    strategy = sp.OneDeviceStrategy() if alone else sp.MirroredStrategy()
    model, loss, train, validation = digits() if given.model == "mlp" else photos(given.size)
    trainer = sp.Trainer(
        model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=loss,
        strategy=strategy,
        deterministic=True,
    )
    losses = Losses()
    history = trainer.fit(
        train,
        epochs=STEPS // len(train),
        validation_data=validation,
        callbacks=[losses],
        verbose=False,
    ).history
    strategy.close()
    if os.environ["RANK"] == "0":
        found = {"loss": losses.values, "validation": history["val_loss"]}
        print(json.dumps(found), flush=True)


def digits() -> tuple[nn.Module, nn.Module, Dataset, Dataset]:
    """4 batches of 7 and one of 1: nothing divides, and replicas go without."""
    x, y = torch.rand(29, 784), torch.randint(0, 10, (29,))
    train = sp.data.arrays(x, y).shuffle().batch(7)
    return mlp(), nn.CrossEntropyLoss(), train, sp.data.arrays(x, y).batch(7)


def photos(size: int) -> tuple[nn.Module, nn.Module, Dataset, Dataset]:
    """9 batches of 6 and one of 2, flipped and turned; ``size`` pixels square."""
    coarse = torch.rand(56, 3, 8, 8)
    x = nn.functional.interpolate(coarse, (size, size), mode="bilinear").mul_(255)
    y = torch.arange(56) % 2
    train = (
        sp.data.arrays(x, y)
        .shuffle()
        .map(sp.data.RandomFlip("horizontal"))
        .map(sp.data.RandomRotation(0.1))
        .batch(6)
    )
    model = sp.models.CatsVsDogs().double()
    return model, nn.BCEWithLogitsLoss(), train, sp.data.arrays(x, y).batch(6)


if __name__ == "__main__":
    main()
