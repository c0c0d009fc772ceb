"""Handwritten digits: a small network learns to tell the ten of them apart.

    spartito train mnist --strategy mirrored --workers 2

The digits come with the package (10,000, MNIST's test set: 8,000 to train, 2,000 to validate);
``--data DIR`` takes the four IDX files of the full MNIST, or of Fashion-MNIST.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.data.images.image_source import read_image
from spartito.recipes.options import fit, parse, run_folder


def main() -> None:
    """Train on every replica; the chief keeps the run folder."""
    options = parse("mnist", epochs=5, batch_size=64)
    strategy = sp.strategy()
    out = run_folder(options, strategy, "mnist")
    if options.data:
        train, validation = sp.data.idx(options.data, "train"), sp.data.idx(options.data, "test")
    else:
        train, validation = sp.data.digits("training"), sp.data.digits("validation")

    with strategy.scope():
        torch.manual_seed(options.seed)
        net = build()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    trainer = sp.Trainer(
        net,
        optimizer=optimizer,
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        precision=options.precision,
        seed=options.seed,
        run_dir=out,
        about={"recipe": {"name": "mnist"}, "data": {"classes": list(train.classes)}},
    )
    best = sp.callbacks.ModelCheckpoint(keep=3)
    fit(trainer, options, train.shuffle().batch(options.batch_size), validation.batch(500), best)


def build() -> nn.Module:
    """The model, as `spartito predict` builds it again."""
    return sp.models.MnistMLP()


def read(path: Path) -> Tensor:
    """A picture of one digit as the model wants it: (28, 28), 0 to 1, ink bright."""
    image = read_image(path, (28, 28), color="grayscale")[0] / 255
    return 1 - image if image.mean() > 0.5 else image  # dark ink on bright paper


def probabilities(output: Tensor) -> Tensor:
    """The probability of each class, shape ``(batch, classes)``."""
    return output.softmax(1)


if __name__ == "__main__":
    main()
