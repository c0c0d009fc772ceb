"""Trains cats-vs-dogs from JPEG files, and prints how long each epoch waited for data."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping

import torch
from torch import nn

import spartito as sp

LOCAL_BATCH = 8


class Waits(sp.Callback):
    """Per epoch: the fraction of waiting, with its first step and without."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self._began = 0.0
        self._first = (0.0, 0.0)
        self._last = (0.0, 0.0)

    def on_epoch_begin(self, epoch: int) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: object) -> None:
        seconds = time.perf_counter() - self._began
        self._last = (seconds, seconds * self.trainer.data_wait_fraction)
        if batch == 0:
            self._first = self._last

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        seconds, waited = (
            last - first for last, first in zip(self._last, self._first, strict=True)
        )
        mine = torch.tensor([waited / seconds], dtype=torch.float64)
        reduce = self.trainer.strategy.reduce
        self.epochs.append(
            {
                "share": logs["data_wait_fraction"],
                "without_first_step": float(reduce("mean", mine)),
                "worst_replica": float(reduce("max", mine)),
                "images_per_second": logs["examples_per_second"],
            }
        )


def main() -> None:
    """Train ``--epochs`` of ``--steps`` global batches."""
    options = argparse.ArgumentParser()
    options.add_argument("folder")
    options.add_argument("--epochs", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--precision", required=True)
    given = options.parse_args()
    strategy = sp.MirroredStrategy()
    train = sp.data.image_folder(given.folder)
    torch.manual_seed(0)
    model = sp.models.CatsVsDogs()
    trainer = sp.Trainer(
        model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=nn.BCEWithLogitsLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        precision=given.precision,
    )
    waits = Waits()
    trainer.fit(
        train.shuffle()
        .map(sp.data.RandomFlip("horizontal"))
        .map(sp.data.RandomRotation(0.1))
        .batch(LOCAL_BATCH * strategy.num_replicas_in_sync),
        epochs=given.epochs,
        steps_per_epoch=given.steps,
        callbacks=[waits],
        verbose=False,
    )
    strategy.close()
    if os.environ["RANK"] == "0":
        print(json.dumps(waits.epochs), flush=True)


if __name__ == "__main__":
    main()
