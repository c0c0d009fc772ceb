"""Clipping by hand, where this task has a part of the gradients alone: it is refused.

torch's `clip_grad_norm_` would take the norm of the part, silently another one on each task.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from spartito.errors import UserError

_PART = "_spartito_part"
_SCALE = "_clip_grads_with_norm_"  # what all of torch's ways to clip by a norm call


def mark(parameters: Iterable[nn.Parameter], are_parts: bool) -> None:
    """Say whether the gradients of these parameters, all together, are those of the model.

    Args:
        parameters: Those of a model that is prepared.
        are_parts: Whether other tasks have others.
    """
    if are_parts and not hasattr(getattr(clip_grad, _SCALE), _PART):
        setattr(clip_grad, _SCALE, _checked(getattr(clip_grad, _SCALE)))
    for parameter in parameters:
        if are_parts or hasattr(parameter, _PART):
            setattr(parameter, _PART, are_parts)


def _checked(plain: Any) -> Any:
    @wraps(plain)
    def scale(parameters: Any, *args: Any, **named: Any) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(getattr(parameter, _PART, False) for parameter in given):
            raise UserError(
                "clip_grad_norm_() where this task has a part of the gradients alone",
                "Trainer(clip_norm=...) or strategy.prepare(..., clip_norm=...) clips by the norm "
                "of all of them.",
            )
        plain(given, *args, **named)

    setattr(scale, _PART, True)
    return scale
