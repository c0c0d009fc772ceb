"""The backward pass of a step, which begins with a factor: what a loss is scaled and divided by."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def first_gradient(value: Tensor, factor: float) -> Tensor:
    """``factor`` as the gradient of a scalar ``value``: the same tensor in step after step."""
    made = _scalar(factor, value.dtype, value.device)
    # A hook of the user's may have written into it.
    return made if made._version == 0 else torch.full_like(value, factor)


def backward(value: Tensor, gradient: Tensor) -> None:
    """As ``value.backward(gradient)``.

    What torch checks there of ``gradient`` is known of ours, and costs 36 of the 600 us of a small
    step: most of it is code that no cache holds by then.
    """
    if type(value) is not Tensor:
        value.backward(gradient)
        return
    _engine_run_backward(
        (value,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@lru_cache(256)
def _scalar(factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), factor, dtype=dtype, device=device)
