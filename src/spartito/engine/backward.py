"""The backward pass of a step, which begins with a factor: what a loss is scaled and divided by."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def first_gradient(value: Tensor, factor: float) -> Tensor:
    """``factor`` as the gradient of a scalar ``value``.

    A new tensor: where a parameter without dimensions is a term of the loss, it becomes its
    ``.grad``, to which later backward passes add in place.
    """
    return torch.full((), factor, dtype=value.dtype, device=value.device)


def backward(value: Tensor, gradient: Tensor) -> None:
    """As ``value.backward(gradient)``.

    What torch checks there of ``gradient`` is known of ours, and costs some 3% of a small step:
    most of it is code that no cache holds by then.
    """
    if type(value) is not Tensor:
        value.backward(gradient)
        return
    _engine_run_backward(
        (value,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
