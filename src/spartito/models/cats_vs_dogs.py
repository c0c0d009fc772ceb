"""A small Xception that tells photos of cats from photos of dogs.

The architecture is that of Keras' example "Image classification from scratch", after Chollet,
"Xception: Deep Learning with Depthwise Separable Convolutions" (2017).
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spartito.errors import UserError
from spartito.models.layers import PointwiseConv2d

WIDTHS = (64, 128, 256, 512, 728)
"""Channels that enter the first residual block, and that leave each of them."""


class SeparableConv2d(nn.Module):
    """A 3x3 convolution of each channel by itself, then a 1x1 convolution that mixes them."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(
            in_channels, in_channels, 3, padding=1, groups=in_channels, bias=False
        )
        self.pointwise = PointwiseConv2d(in_channels, out_channels)

    def forward(self, input: Tensor) -> Tensor:
        """``(batch, in_channels, height, width)`` to ``(batch, out_channels, height, width)``."""
        return cast(Tensor, self.pointwise(self.depthwise(input)))


class ResidualBlock(nn.Module):
    """Two separable convolutions and a pooling that halves the picture, beside a projection."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.separable1 = SeparableConv2d(in_channels, out_channels)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.separable2 = SeparableConv2d(out_channels, out_channels)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.projection = nn.Conv2d(in_channels, out_channels, 1, stride=2)

    def forward(self, input: Tensor) -> Tensor:
        """``(batch, in_channels, h, w)`` to ``(batch, out_channels, h / 2, w / 2)``, rounded up."""
        x = self.norm1(self.separable1(F.relu(input)))
        x = self.norm2(self.separable2(F.relu_(x)))
        return cast(Tensor, self.pool(x) + self.projection(input))


class CatsVsDogs(nn.Module):
    """Keras' small Xception: one logit a photo, above 0 for the second class.

    2,782,649 parameters and statistics = 2,773,913 trainable + 8,736 not. The input has any
    height and width; users need no `channels_last`: the model brings its input to it, and every
    layer passes it on. The weights stay in torch's default layout, since torch's fused
    optimizers go wrong without a word where a gradient has other strides than its parameter.

    BatchNorm keeps torch's momentum of 0.1 (Keras' 0.99 is 0.01 here): the first epochs are 100
    steps or so, after which a momentum of 0.01 still carries a third of the statistics that it
    began with, and the first validations mean nothing. The weights begin as torch's layers do:
    with Keras' Glorot-uniform ones the validation accuracy of the first three epochs was lower
    (4,000 photos at 64x64, Adam 1e-3, one seed: 0.60, 0.69, 0.68 against 0.69, 0.72, 0.71).
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry1 = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.entry1_norm = nn.BatchNorm2d(32)
        self.entry2 = nn.Conv2d(32, WIDTHS[0], 3, padding=1)
        self.entry2_norm = nn.BatchNorm2d(WIDTHS[0])
        self.blocks = nn.Sequential(*(ResidualBlock(i, o) for i, o in pairwise(WIDTHS)))
        self.exit = SeparableConv2d(WIDTHS[-1], 1024)
        self.exit_norm = nn.BatchNorm2d(1024)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(1024, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Tell cats from dogs.

        Args:
            images: ``(batch, 3, height, width)``, bytes or floats from 0 to 255.

        Returns:
            One logit for each photo, ``(batch, 1)``, for the second class of the folder.

        Raises:
            UserError: For any other shape.
        """
        if images.dim() != 4 or images.shape[1] != 3:
            raise UserError(
                f"images of shape {tuple(images.shape)} where CatsVsDogs takes colour photos",
                "Give (batch, 3, height, width); photos with channels last want "
                ".permute(0, 3, 1, 2).",
            )
        x = images.to(self.entry1.weight.dtype, memory_format=torch.channels_last) / 255
        # A ReLU in place is safe behind a BatchNorm, whose backward needs only its input.
        x = F.relu_(self.entry1_norm(self.entry1(x)))
        x = F.relu_(self.entry2_norm(self.entry2(x)))
        x = self.blocks(x)
        x = F.relu_(self.exit_norm(self.exit(x)))
        return cast(Tensor, self.head(self.dropout(x.mean((2, 3)))))
