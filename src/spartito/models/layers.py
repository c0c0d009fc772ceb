"""Layers that mean the same as torch's and are cheaper on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MODE = "lin"


class PointwiseConv2d(nn.Conv2d):
    """x"""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 1)

    def forward(self, input: Tensor) -> Tensor:
        if MODE == "plain" or input.dtype != torch.float32:
            return super().forward(input)
        if MODE == "d2":
            return F.conv2d(input, self.weight, self.bias, dilation=2)
        if MODE == "lin":
            return F.linear(input.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(
                0, 3, 1, 2
            )
        n, c, h, w = input.shape
        k = next(k for k in range(1, h + 1) if h % k == 0 and n * k >= 16)
        if MODE == "rowsw":
            k = h
        v = input.permute(0, 2, 3, 1).reshape(n * k, h // k, w, c).permute(0, 3, 1, 2)
        y = F.conv2d(v, self.weight, self.bias)
        return y.permute(0, 2, 3, 1).reshape(n, h, w, -1).permute(0, 3, 1, 2)
