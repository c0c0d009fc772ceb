"""What is drawn at random: for the whole tensor, as one device would, and cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spartito.mesh.sharded_tensor import Sharded, like, local_of, rule


def dropout_mask(
    shape: Sequence[int], p: float, near: Tensor, own: Callable[[Tensor], Tensor]
) -> Tensor:
    """What a dropout multiplies the shard by.

    Args:
        shape: Of the whole tensor: all of it is drawn, as torch would.
        p: The chance that an element becomes 0.
        near: Has the dtype and device.
        own: Takes this task's shard of a whole tensor.
    """
    drawn = torch.empty(tuple(shape), dtype=near.dtype, device=near.device)
    if p == 1.0:
        return own(drawn.zero_())
    return own(drawn.bernoulli_(1 - p)) / (1 - p)


def _channels(func: Any, x: Tensor) -> tuple[int, ...]:
    """The shape of the mask of a dropout of whole channels."""
    spatial = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}[func]
    return tuple(x.shape[: x.dim() - spatial]) + (1,) * spatial


@rule(F.dropout, torch.dropout, torch.dropout_, F.dropout1d, F.dropout2d, F.dropout3d,
      torch.feature_dropout)  # fmt: skip
def _dropout(
    func: Any, input: Sharded, p: float = 0.5, training: Any = None, inplace: bool = False,
    train: bool | None = None,
) -> Any:  # fmt: skip
    """The same elements as on one device: all tasks draw all, and take theirs."""
    if training is None:
        training = func in (F.dropout, *_CHANNELS) and func is not F.feature_alpha_dropout
        training = train if train is not None else training
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return input

    def cut(whole: Tensor) -> Tensor:
        return local_of(whole.expand(input.shape), input.spec, input.axes)

    shape = tuple(input.shape)
    if func in _CHANNELS:
        shape = _channels(func, input)
    elif func is torch.feature_dropout:
        shape = shape[:2] + (1,) * (len(shape) - 2)
    own = dropout_mask(shape, p, input.local, cut)
    if inplace or func is torch.dropout_:
        input.local.mul_(own)
        return input
    return like(input.local * own, input)


_CHANNELS = (F.dropout1d, F.dropout2d, F.dropout3d)


@rule(torch.rand_like, torch.randn_like, torch.randint_like)
def _random_like(func: Any, x: Sharded, *args: Any, **named: Any) -> Any:
    ghost = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return like(local_of(func(ghost, *args, **named), x.spec, x.axes), x)


@rule(torch.bernoulli)
def _bernoulli(func: Any, x: Sharded, *args: Any, **named: Any) -> Any:
    return like(local_of(func(x.whole().detach(), *args, **named), x.spec, x.axes), x)


@rule(Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_)
def _fill(func: Any, x: Sharded, *args: Any, **named: Any) -> Any:
    args = tuple(each.whole() if isinstance(each, Sharded) else each for each in args)
    ghost = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.no_grad():
        drawn = func(ghost, *args, **named)
    x.local.copy_(local_of(drawn, x.spec, x.axes))
    return x
