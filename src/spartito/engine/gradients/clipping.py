"""Clipping by hand where ``.grad`` is not yet, or not all of, what an update uses: refused.

Before the replicas' gradients are summed each would clip by its own. Where a task has a part of
the model it would take the norm of that part. Both are silently other numbers than on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn.utils import clip_grad

from spartito.engine.gradients.gradient_sum import Gradients
from spartito.errors import UserError


class Prepared(Protocol):
    """One prepared model and optimizer."""

    @property
    def gradients(self) -> Gradients:
        """What waits for the next update."""
        ...


class AllPrepared(Protocol):
    """All that a strategy has prepared so far."""

    @property
    def all(self) -> Sequence[Prepared]:
        """One after the other."""
        ...


class _Kind(NamedTuple):
    are_parts: bool  # other tasks have the gradients of other parameters
    are_summed_later: bool  # over the replicas, after the backward pass


_watched: WeakKeyDictionary[AllPrepared, _Kind] = WeakKeyDictionary()


def watch(prepared: AllPrepared, are_parts: bool, are_summed_later: bool) -> None:
    """Refuse clipping by hand, from now on, where it would go wrong.

    Args:
        prepared: What a strategy has prepared; it is not kept alive.
        are_parts: Whether other tasks have gradients of other parameters.
        are_summed_later: Whether replicas sum theirs after the backward pass.
    """
    if are_parts or are_summed_later:
        _install()
        _watched[prepared] = _Kind(are_parts, are_summed_later)


def forget(prepared: AllPrepared) -> None:
    """Refuse nothing any more: what waits there is part of no update.

    Args:
        prepared: What `watch` was given.
    """
    _watched.pop(prepared, None)


@cache
def _install() -> None:
    """Have torch's functions ask first, whoever has imported them: their bodies are replaced."""
    for function, by_norm in (
        (clip_grad._clip_grads_with_norm_, True),  # what all ways to clip by a norm call
        (clip_grad.clip_grad_value_, False),
    ):
        (body,) = function.__closure__ or ()
        body.cell_contents = _checked(body.cell_contents, by_norm)


def _checked(plain: Callable[..., None], by_norm: bool) -> Callable[..., None]:
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **named: Any) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        _check({id(parameter) for parameter in given}, by_norm)
        plain(given, *args, **named)

    return clip


def _check(given: set[int], by_norm: bool) -> None:
    """Raise `UserError` where the gradients of these parameters (ids) are not an update's."""
    for prepared, kind in _watched.items():
        for gradients in (one.gradients for one in prepared.all):
            waits = gradients.loss_divisor and not given.isdisjoint(map(id, gradients.parameters))
            if waits and by_norm and kind.are_parts:
                raise UserError(
                    "clip_grad_norm_() where this task has a part of the gradients alone",
                    "Trainer(clip_norm=...) or strategy.prepare(..., clip_norm=...) clips by the "
                    "norm of all of them.",
                )
            if waits and kind.are_summed_later and not gradients.summed:
                raise UserError(
                    f"clip_grad_{'norm' if by_norm else 'value'}_() before the gradients of all "
                    "replicas are summed: each would clip its own",
                    "Trainer(clip_norm=...) or strategy.prepare(..., clip_norm=...) clips the sum "
                    "by its norm. Under mirrored a function given to "
                    "optimizer.register_step_pre_hook has the sum too.",
                )
