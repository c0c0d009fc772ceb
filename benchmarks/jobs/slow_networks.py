"""One run of `benchmarks.slow_networks`: digits or photos under the strategy of the environment."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import spartito as sp
from benchmarks.common import flush_denormals

SIZE = (64, 64)
"""Of photos: an epoch is then a few seconds, and the model as large as ever."""


def main() -> None:
    """Train, with evaluations, or for some steps without."""
    options = argparse.ArgumentParser()
    options.add_argument("model", choices=("digits", "photos"))
    options.add_argument("--data", type=Path)
    options.add_argument("--cache", type=Path, help="of decoded photos")
    options.add_argument("--epochs", type=int, required=True)
    options.add_argument("--steps", type=int, help="of an epoch, without evaluations")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--lr", type=float, default=1e-3)
    options.add_argument("--thin", action="store_true", help="PowerSGD from the third step on")
    given = options.parse_args()
    flush_denormals()
    thin = sp.PowerSGD(exact_steps=2)
    strategy = sp.MultiWorkerMirroredStrategy(compress=thin) if given.thin else sp.strategy()
    train, validation = (
        sp.data.digits(part)
        if given.model == "digits"
        else sp.data.image_folder(given.data, SIZE, 0.2, part, cache=given.cache)
        for part in ("training", "validation")
    )
    with strategy.scope():
        torch.manual_seed(given.seed)
        digits = given.model == "digits"
        net: nn.Module = sp.models.MnistMLP() if digits else sp.models.CatsVsDogs()
        optimizer = torch.optim.Adam(net.parameters(), lr=given.lr)
    trainer = sp.Trainer(
        net,
        optimizer=optimizer,
        loss=nn.CrossEntropyLoss() if digits else nn.BCEWithLogitsLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        seed=given.seed,
    )
    train = train.shuffle() if digits else train.shuffle().map(sp.data.RandomFlip("horizontal"))
    trainer.fit(
        train.batch(64),
        epochs=given.epochs,
        steps_per_epoch=given.steps,
        validation_data=None if given.steps else validation.batch(200),
    )
    strategy.close()


if __name__ == "__main__":
    main()
