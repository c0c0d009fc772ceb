"""Norms as other libraries and users write them: subclasses of torch's with forward passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm has it: the forward pass of `nn.BatchNorm2d` written out, and an activation."""

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        follows = not self.training or self.track_running_stats
        x = F.batch_norm(
            x,
            self.running_mean if follows else None,
            self.running_var if follows else None,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            factor,
            self.eps,
        )
        out: Tensor = self.act(x)
        return out


class Renamed(nn.BatchNorm2d):
    """A subclass that changes nothing in the forward pass."""

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **{"eps": 1e-3, **options})


class Around(nn.BatchNorm2d):
    """One that computes something around torch's."""

    def forward(self, input: Tensor, scale: float = 2.0) -> Tensor:
        return super().forward(input * scale).relu()


class BuiltIn(nn.BatchNorm2d):
    """One that calls the function below `F.batch_norm`, with its rows in another shape."""

    def forward(self, input: Tensor) -> Tensor:
        channels = input.shape[1]
        flat = input.movedim(1, -1).reshape(-1, channels)
        flat = torch.batch_norm(
            flat, self.weight, self.bias, self.running_mean, self.running_var, self.training,
            self.momentum or 0.0, self.eps, False,
        )  # fmt: skip
        return flat.view(*input.movedim(1, -1).shape).movedim(-1, 1)


class Instances(nn.InstanceNorm2d):
    """Each instance is normalized by itself, and the running statistics are a mean of all."""

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **{"affine": True, "track_running_stats": True, **options})


class Chunked(nn.BatchNorm2d):
    """Ghost BatchNorm: parts of the rows by themselves."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(Chunked, self).forward(part) for part in input.chunk(2)])


class Ghost(nn.BatchNorm2d):
    """Ghost BatchNorm: parts of a size, of which a replica's rows may be one."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(Ghost, self).forward(part) for part in input.split(4)])


class Folded(nn.BatchNorm2d):
    """Ghost BatchNorm: rows as channels."""

    def forward(self, input: Tensor) -> Tensor:
        n, c, *rest = input.shape
        wide = F.batch_norm(input.reshape(1, n * c, *rest), None, None, training=True)
        return wide.view(input.shape)


class Split(nn.BatchNorm2d):
    """Only some of the rows, as with auxiliary norms."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super().forward(input[:-1]), input[-1:]])
