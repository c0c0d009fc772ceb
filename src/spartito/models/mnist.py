"""A small network for handwritten digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PIXELS, HIDDEN, CLASSES = 28 * 28, 256, 10


class MnistMLP(nn.Module):
    """784-256-256-10 with ReLU: 269,322 parameters.

    Takes images 0 to 1 of shape ``(batch, 28, 28)`` (or any whose values number 784) and
    answers the logits of the ten classes, ``(batch, 10)``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(PIXELS, HIDDEN)
        self.hidden2 = nn.Linear(HIDDEN, HIDDEN)
        self.logits = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, 10)``."""
        x = torch.relu(self.hidden1(x.flatten(1)))
        x = torch.relu(self.hidden2(x))
        out: Tensor = self.logits(x)
        return out
