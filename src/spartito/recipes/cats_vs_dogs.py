"""Photos of cats and dogs: a small Xception learns to tell them apart.

    spartito train cats_vs_dogs --data PetImages --strategy mirrored --workers 2

``--data DIR`` has one folder per class with photos of any size. A fifth of them validates.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.data.images import read_image
from spartito.recipes.options import finish, go_on, parse, run_folder


def main() -> None:
    """Train on every replica; the chief keeps the run folder."""
    options = parse("cats_vs_dogs", epochs=10, batch_size=32)
    if options.data is None:
        raise sp.UserError(
            "cats_vs_dogs needs photos, and --data names none",
            "Give a folder with one folder of photos per class.",
        )
    strategy = sp.strategy()
    out = run_folder(options, strategy, "cats_vs_dogs")
    photos = sp.data.image_folder(options.data, subset="training")
    train = (
        photos.shuffle()
        .map(sp.data.RandomFlip("horizontal"))
        .map(sp.data.RandomRotation(0.1))
        .batch(options.batch_size)
    )
    validation = sp.data.image_folder(options.data, subset="validation").batch(options.batch_size)
    steps = options.epochs * len(train)

    def rate(step: int) -> float:
        """Up over the first twentieth of all steps, then down along half a cosine."""
        return min(1, 20 * (step + 1) / steps) * (1 + math.cos(math.pi * min(1, step / steps))) / 2

    with strategy.scope():
        torch.manual_seed(options.seed)
        net = build()
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    trainer = sp.Trainer(
        net,
        optimizer=optimizer,
        loss=nn.BCEWithLogitsLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        precision=options.precision,
        seed=options.seed,
        run_dir=out,
        about={"recipe": {"name": "cats_vs_dogs"}, "data": {"classes": list(photos.classes)}},
    )
    backups = go_on(trainer, options)
    trainer.fit(
        train,
        epochs=options.epochs,
        validation_data=validation,
        callbacks=[
            sp.callbacks.ModelCheckpoint(monitor="val_accuracy", keep=3),
            sp.callbacks.TensorBoard(),
            backups,
        ],
    )
    finish(trainer, options)
    strategy.close()


def build() -> nn.Module:
    """The model, as `spartito predict` builds it again."""
    return sp.models.CatsVsDogs()


def read(path: Path) -> Tensor:
    """A photo as the model wants it: (3, 180, 180), 0 to 255."""
    return read_image(path, (180, 180))


def probabilities(output: Tensor) -> Tensor:
    """The probability of each class, shape ``(batch, 2)``."""
    second = output.sigmoid()
    return torch.cat([1 - second, second], 1)


if __name__ == "__main__":
    main()
