"""Photos of cats and dogs: a small Xception learns to tell them apart.

    spartito train cats_vs_dogs --data PetImages --strategy mirrored --workers 2

``--data`` names a folder, here or in a store: one folder per class with photos of any size, or
what ``spartito data pack`` made of such. A fifth of the photos validates.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.data.blocks.locating import images_at
from spartito.data.images.image_source import SUBSETS, Subset, read_image
from spartito.data.source import BlockSource
from spartito.recipes.options import fit, parse, run_folder

BLOCKS = 16
"""Of packed photos, among which one is moved."""


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
    photos, validation = (photos_of(options.data, subset) for subset in SUBSETS)
    train = (
        photos.shuffle(blocks=BLOCKS if isinstance(photos.source, BlockSource) else None)
        .map(sp.data.RandomFlip("horizontal"))
        .map(sp.data.RandomRotation(0.1))
        .batch(options.batch_size)
    )
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
    best = sp.callbacks.ModelCheckpoint(monitor="val_accuracy", keep=3)
    fit(trainer, options, train, validation.batch(options.batch_size), best)


def photos_of(where: str, subset: Subset) -> sp.data.Dataset:
    """The photos of a subset: from their files, or packed."""
    if images_at(where) is not None:
        return sp.data.image_folder(where, validation_split=0.2, subset=subset)
    return sp.data.packed(
        where, image_size=(180, 180), validation_split=0.2, subset=subset, key="key"
    )


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
