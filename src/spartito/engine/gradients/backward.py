"""The backward pass of a step, which begins with a factor: what a loss is scaled and divided by."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def first_gradient(value: Tensor, factor: float) -> Tensor:
    """``factor`` as the gradient of a scalar ``value``.

    A new tensor: where a parameter without dimensions is a term of the loss, it becomes its
    ``.grad``, to which later backward passes add in place.
    """
    kind = _NUMPY.get(value.dtype)
    if kind is None or not value.is_cpu:
        return torch.full((), factor, dtype=value.dtype, device=value.device)
    return torch.from_numpy(np.array(factor, kind))  # half the time of `torch.full`


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
