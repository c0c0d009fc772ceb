"""Characters: a small GPT learns to write on.

    spartito train gpt --strategy mirrored --workers 2
    spartito predict runs/gpt-... --prompt "ROMEO." --seed 3

The text comes with the package (six tragedies by Shakespeare, 836,000 characters); ``--data FILE``
takes another one, in UTF-8. Its last tenth validates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

import spartito as sp
from spartito.recipes.options import fit, parse, run_folder


def main() -> None:
    """Train on every replica; the chief keeps the run folder."""
    options = parse("gpt", epochs=5, batch_size=32)
    strategy = sp.strategy()
    out = run_folder(options, strategy, "gpt")
    text = sp.data.characters(options.data, "training")
    train = text.shuffle().batch(options.batch_size, drop_remainder=True)
    validation = sp.data.characters(options.data, "validation").batch(options.batch_size)
    steps = options.epochs * len(train)

    def rate(step: int) -> float:
        """Up over the first 50 steps, then down along half a cosine to a tenth."""
        done = min(1, step / steps)
        return min(1, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * done))

    with strategy.scope():
        torch.manual_seed(options.seed)
        net = build(len(text.classes))
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.99))
    trainer = sp.Trainer(
        net,
        optimizer=optimizer,
        loss=next_character,
        metrics=[accuracy, "perplexity"],
        strategy=strategy,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        clip_norm=1.0,
        precision=options.precision,
        seed=options.seed,
        run_dir=out,
        about={"recipe": {"name": "gpt"}, "data": {"classes": list(text.classes)}},
    )
    fit(trainer, options, train, validation, sp.callbacks.ModelCheckpoint(keep=3))


def build(characters: int) -> sp.models.GPT:
    """The model, as `spartito predict` builds it again.

    It has no dropout: it sees the text five times, and does not learn it by heart from that.
    """
    return sp.models.GPT.small(characters, dropout=0.0)


def next_character(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy; all examples are equally long, so it is a mean over examples too."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Where the likeliest character is the one that comes, shape ``(batch, characters)``."""
    return torch.eq(output.argmax(-1), target)


if __name__ == "__main__":
    main()
