from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from spartito.models.layers import PointwiseConv2d

INPLACE = True
SKIP = True


def R(x):
    return F.relu_(x) if INPLACE else F.relu(x)


class Separable(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.depthwise = nn.Conv2d(i, i, 3, padding=1, groups=i, bias=False)
        self.pointwise = PointwiseConv2d(i, o)

    def forward(self, x):
        return self.pointwise(self.depthwise(x))


class Block(nn.Module):
    def __init__(self, i, o, first):
        super().__init__()
        self.first = first
        self.sep1 = Separable(i, o)
        self.norm1 = nn.BatchNorm2d(o)
        self.sep2 = Separable(o, o)
        self.norm2 = nn.BatchNorm2d(o)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.proj = nn.Conv2d(i, o, 1, stride=2)

    def forward(self, x):
        y = self.norm1(self.sep1(x if self.first and SKIP else F.relu(x)))
        y = self.pool(self.norm2(self.sep2(R(y))))
        return y.add_(self.proj(x)) if INPLACE else y + self.proj(x)


class CatsVsDogs(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.b1 = nn.BatchNorm2d(32)
        self.c2 = nn.Conv2d(32, 64, 3, padding=1)
        self.b2 = nn.BatchNorm2d(64)
        w = [64, 128, 256, 512, 728]
        self.blocks = nn.Sequential(*[Block(i, o, i == 64) for i, o in zip(w, w[1:])])
        self.sep = Separable(728, 1024)
        self.b3 = nn.BatchNorm2d(1024)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(1024, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = x.contiguous(memory_format=torch.channels_last) / 255
        x = R(self.b1(self.c1(x)))
        x = R(self.b2(self.c2(x)))
        x = self.blocks(x)
        x = R(self.b3(self.sep(x)))
        return self.fc(self.drop(x.mean((2, 3))))
