"""One of ten small trainings on random data, for a plan and a comparison of it.

    python predicted.py NAME [EXAMPLES]

Those of `BUILT` were looked at while the plan was written; those of `NEW` are of other families.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp

EPOCHS = 3
FEW, MANY = 2048, 16_384
"""Examples, so that an epoch of a small model takes long against its beginning and end, too."""
CLASSES, TOKENS, LENGTH = 10, 20_000, 32


def mlp() -> nn.Module:
    """The digits' network."""
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, CLASSES))


def wide() -> nn.Module:
    """Ten million parameters in two layers: the exchange weighs."""
    return nn.Sequential(nn.Linear(784, 12_000), nn.ReLU(), nn.Linear(12_000, CLASSES))


def convolutions() -> nn.Module:
    """Photos: the computation weighs."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


class _Tokens(nn.Module):
    """Token ids to classes, by something in between."""

    def __init__(self, width: int, body: nn.Module, tokens: int = TOKENS) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(tokens, width), body
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.body(self.embedding(ids))
        classes: Tensor = self.head((found[0] if isinstance(found, tuple) else found).mean(1))
        return classes


def embedding() -> nn.Module:
    """Nearly all of its parameters are a table."""
    return _Tokens(64, nn.Linear(64, 64))


def decoder() -> nn.Module:
    """Blocks of attention, as a small GPT has them."""
    return _transformer(128, 4, 1000)


def _transformer(width: int, depth: int, tokens: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    return _Tokens(width, nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), tokens)


def deep() -> nn.Module:
    """Many small layers: Python weighs."""
    layers: list[nn.Module] = [nn.Linear(784, 64)]
    for _ in range(24):
        layers += [nn.Tanh(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.Linear(64, CLASSES))


def recurrent() -> nn.Module:
    """One step after the other."""
    return _Tokens(64, nn.LSTM(64, 64, batch_first=True), 1000)


class _Mixer(nn.Module):
    """A block that mixes tokens, then channels."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(length, 64), nn.GELU(), nn.Linear(64, length))
        self.channels = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.channels(x)
        return mixed


def mixer() -> nn.Module:
    """Layers along both sides of a table."""
    return _Tokens(96, nn.Sequential(*(_Mixer(LENGTH, 96) for _ in range(6))), 1000)


def separable() -> nn.Module:
    """Depthwise convolutions: memory weighs more than arithmetic."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU()]
    for before, after in ((32, 64), (64, 96), (96, 128)):
        layers += [nn.Conv2d(before, before, 3, padding=1, groups=before), nn.ReLU()]
        layers += [nn.Conv2d(before, after, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def encoder() -> nn.Module:
    """A wider, shallower transformer."""
    return _transformer(256, 2, 4000)


Model = tuple[Callable[[], nn.Module], str, int, int]
PIXELS, PHOTOS, IDS = "pixels", "photos", "tokens"
BUILT: dict[str, Model] = {
    "mlp": (mlp, PIXELS, 64, MANY),
    "wide": (wide, PIXELS, 64, FEW),
    "convolutions": (convolutions, PHOTOS, 32, FEW),
    "embedding": (embedding, IDS, 64, MANY),
    "decoder": (decoder, IDS, 32, FEW),
}
NEW: dict[str, Model] = {
    "deep": (deep, PIXELS, 64, MANY),
    "recurrent": (recurrent, IDS, 64, MANY),
    "mixer": (mixer, IDS, 32, FEW),
    "separable": (separable, PHOTOS, 32, FEW),
    "encoder": (encoder, IDS, 32, FEW),
}


def data(kind: str, examples: int) -> Tensor:
    """So many examples of a kind, all random."""
    if kind == IDS:
        return torch.randint(0, 1000, (examples, LENGTH))
    if kind == PHOTOS:
        return torch.rand(examples, 3, 32, 32)
    return torch.rand(examples, 784)


def main(name: str, limit: int = MANY) -> None:
    """Train it, with so many examples at most."""
    torch.manual_seed(0)
    make, kind, batch, examples = (BUILT | NEW)[name]
    trainer = sp.Trainer(make(), optimizer=torch.optim.Adam, loss=nn.CrossEntropyLoss())
    examples = min(examples, limit)
    labels: Any = torch.randint(0, CLASSES, (examples,))
    chain = sp.data.arrays(data(kind, examples), labels).shuffle().batch(batch)
    trainer.fit(chain, epochs=EPOCHS, verbose=False)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
