"""The two models as anyone writes them in plain torch, and the data that all sides train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

SHAPES = {"mlp": (500, 32), "wide": (50, 32), "deep": (50, 32), "xception": (4, 8)}
"""Global batches in memory, and the local batch."""

WIDTHS = {"mlp": (256, 256), "wide": (2048, 2048, 2048), "deep": (188,) * 25}
"""The hidden layers of the MLPs: 0.27, 10 and 1 million parameters."""


@dataclass(frozen=True)
class Work:
    """A model, its loss, and examples in memory, ``batches`` global batches of them."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    local_batch: int

    def ready(self, rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
        """The local batches of ``rank``, as views: the same rows that a strategy would give it."""
        size = self.local_batch
        return [
            (self.x[first : first + size], self.y[first : first + size])
            for first in range(rank * size, len(self.x), world_size * size)
        ]


def make_work(name: str, world_size: int) -> Work:
    """The work of one benchmark, the same on all ranks and sides."""
    torch.manual_seed(0)
    batches, size = SHAPES[name]
    count = batches * size * world_size
    if name in WIDTHS:
        x, y = torch.rand(count, 784), torch.randint(0, 10, (count,))
        return Work(mlp(WIDTHS[name]), nn.CrossEntropyLoss(), x, y, size)
    images = torch.rand(count, 3, 180, 180).mul_(255)
    x, y = images.contiguous(memory_format=torch.channels_last), torch.rand(count, 1).round()
    model = Xception().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Work(model, nn.BCEWithLogitsLoss(), x, y, size)


def in_default_layout(work: Work) -> Work:
    """Pictures and weights as torch lays them out where nobody asks for `channels_last`."""
    model = work.model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return replace(work, model=model, x=work.x.contiguous())


def mlp(widths: Sequence[int] = WIDTHS["mlp"]) -> nn.Module:
    """Linear layers with ReLU between them, from 784 numbers to 10 classes."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((784, *widths)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


class Separable(nn.Sequential):
    """A depthwise 3x3 convolution, then a 1x1 one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False),
            nn.Conv2d(inputs, outputs, 1),
        )


class Block(nn.Module):
    """Two separable convolutions and a pooling, beside a strided 1x1 convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReLU(),
            Separable(inputs, outputs),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            Separable(outputs, outputs),
            nn.BatchNorm2d(outputs),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, channels, height, width)``, half as high and wide."""
        return torch.add(self.body(x), self.shortcut(x))


class Xception(nn.Module):
    """Keras' small Xception for cats and dogs: 2,773,913 trainable parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 728)
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            *(Block(i, o) for i, o in pairwise(widths)),
            Separable(728, 1024),
            nn.BatchNorm2d(1024),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(1024, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels from 0 to 255, ``(batch, 3, height, width)``, to logits ``(batch, 1)``."""
        pooled: Tensor = self.features(x / 255).mean((2, 3))
        logits: Tensor = self.head(self.dropout(pooled))
        return logits
