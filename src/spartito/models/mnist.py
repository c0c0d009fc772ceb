"""A small network for handwritten digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spartito.errors import UserError

PIXELS, HIDDEN, CLASSES = 28 * 28, 256, 10


class MnistMLP(nn.Module):
    """784-256-256-10 with ReLU between: 269,322 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(PIXELS, HIDDEN)
        self.hidden2 = nn.Linear(HIDDEN, HIDDEN)
        self.logits = nn.Linear(HIDDEN, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Read digits.

        Args:
            images: ``(batch, 784)``, ``(batch, 28, 28)`` or ``(batch, 1, 28, 28)``: floats from 0
                to 1, or bytes from 0 to 255, which become such floats.

        Returns:
            The logits of the ten digits, ``(batch, 10)``.

        Raises:
            UserError: For any other shape.
        """
        if images.dim() < 2 or images.shape[1:].numel() != PIXELS:
            raise UserError(
                f"images of shape {tuple(images.shape)} where MnistMLP takes 784 pixels each",
                "Give (batch, 784), (batch, 28, 28) or (batch, 1, 28, 28).",
            )
        x = images.flatten(1)
        if not x.is_floating_point():
            x = x.to(self.hidden1.weight.dtype) / 255
        # A ReLU in place is safe behind a linear layer, whose backward needs only its input.
        x = torch.relu_(self.hidden1(x))
        x = torch.relu_(self.hidden2(x))
        logits: Tensor = self.logits(x)
        return logits
