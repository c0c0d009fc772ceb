"""Blocks after which tensors have their values again, and parameters their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def keeping_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A block after which these have the values that they had before."""
    before = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


@contextmanager
def gradients_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """A block that begins without gradients, and leaves those that there were."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
