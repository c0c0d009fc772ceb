"""Gradients that change beside ``strategy.backward``: each replica has its part of them alone.

What adds to these parts, or is no fixed factor, makes other numbers than on one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from spartito.engine.optimizers import optimizer_parameters
from spartito.errors import UserError
from spartito.log import warn

ADVICE = (
    "Put all losses, and any factor, into the one loss for strategy.backward(loss, batch). Change "
    "gradients in a function given to optimizer.register_step_pre_hook: under mirrored and "
    "multi_worker_mirrored it has those of all replicas."
)


class Edits:
    """Tells by identity and version whether gradients are those that a backward pass has left.

    Args:
        optimizer: Whose gradients.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._left: dict[int, tuple[ref[Tensor] | None, int]] = {}
        _install()
        _of_optimizers[optimizer] = self

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take these gradients as they are now; none of them is kept alive.

        Args:
            parameters: Whose gradients.
        """
        for parameter in parameters:
            grad = parameter.grad
            noted = (None, 0) if grad is None else (ref(grad), grad._version)
            self._left[id(parameter)] = noted

    def changed(self, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        """The parameters whose gradients are others than was noted, and not dropped.

        Args:
            parameters: Those to look at. What was not noted had no gradient.
        """
        for parameter in parameters:
            if not self._is_left(parameter) and _holds_any(parameter.grad):
                yield parameter

    def _is_left(self, parameter: nn.Parameter) -> bool:
        grad, (found, version) = parameter.grad, self._left.get(id(parameter), (None, 0))
        if grad is None or found is None:
            return grad is None and found is None
        return found() is grad and grad._version == version


def tell(name: str, deterministic: bool) -> None:
    """Refuse an update of gradients that were changed on each replica, or warn of it once.

    Args:
        name: The user's name of a parameter that has one.
        deterministic: Whether the training is to equal that of one device.

    Raises:
        UserError: It is deterministic.
    """
    if deterministic:
        raise UserError(
            f"the gradient of {name!r} was changed beside strategy.backward(), by another "
            "backward() or by hand: each replica changed its own part of it",
            ADVICE,
        )
    _say()


@cache
def _say() -> None:
    warn(
        "gradients were changed beside strategy.backward(), by another backward() or by hand: each "
        "replica changed its own part of them. All but a fixed factor makes other numbers than on "
        "one device. %s",
        ADVICE,
    )


def _holds_any(grad: Tensor | None) -> bool:
    """Whether this is more than zeros, which say no more than no gradient does."""
    if grad is None:
        return False
    return grad.layout != torch.strided or bool(grad.any())


_of_optimizers: WeakKeyDictionary[Optimizer, Edits] = WeakKeyDictionary()


@contextmanager
def rewriting(optimizer: Optimizer | None) -> Iterator[None]:
    """A block in which gradients are moved, or scaled by what is the same everywhere.

    Args:
        optimizer: Whose gradients; what was no change before is none afterwards.
    """
    edits = None if optimizer is None else _of_optimizers.get(optimizer)
    if edits is None or optimizer is None:
        yield
        return
    left = [p for p in optimizer_parameters(optimizer) if edits._is_left(p)]
    yield
    edits.note(left)


@cache
def _install() -> None:
    """Have torch's scalers say that they divide by their scale."""
    plain: Any = GradScaler.unscale_

    @wraps(plain)
    def unscale_(self: GradScaler, optimizer: Optimizer) -> None:
        with rewriting(optimizer):
            plain(self, optimizer)

    GradScaler.unscale_ = unscale_  # type: ignore[method-assign]
