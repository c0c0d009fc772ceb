"""Gradients that change beside ``strategy.backward``: each replica has its part of them alone.

What adds to these parts, or is no fixed factor, makes other numbers than on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from spartito.engine.devices.precision import ReducedScaler
from spartito.engine.updates.optimizers import optimizer_parameters
from spartito.errors import UserError
from spartito.notes import warn

ADVICE = (
    "Put all losses, and any factor, into the one loss for strategy.backward(loss, batch). Change "
    "gradients in a function given to optimizer.register_step_pre_hook: under mirrored and "
    "multi_worker_mirrored it has those of all replicas."
)


FIRST, SELDOM = 16, 61
"""Where training is not deterministic, norms are taken in the first updates, then each so many."""


class Edits:
    """Tells whether gradients are those that a backward pass has left.

    By identity and version; those of a CPU also by their norm, as what is written through
    ``.data`` or by torch's functions of lists leaves no trace in versions. Norms take time.

    Args:
        optimizer: Whose gradients.
        deterministic: Whether edits are refused, and norms taken in all updates, not in the first
            ones and a few alone.
    """

    def __init__(self, optimizer: Optimizer, deterministic: bool = False) -> None:
        self._deterministic, self._said = deterministic, False
        self._noted, self._has_norms = 0, True
        self._left: dict[int, tuple[ref[Tensor], int, str]] = {}
        self.largest: Callable[[], Callable[[Tensor], Tensor] | None] = lambda: None
        """Refers to what makes of a value the largest of all tasks that update together."""
        _install()
        _of_optimizers[optimizer] = self

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take these gradients as they are now; none of them is kept alive.

        Args:
            parameters: Whose gradients.
        """
        self._noted += 1
        self._has_norms = self._deterministic or self._noted <= FIRST or self._noted % SELDOM == 0
        if not self._has_norms:
            for parameter in parameters:
                if (grad := parameter.grad) is not None:
                    self._left[id(parameter)] = ref(grad), grad._version, ""
            return
        for parameter, grad, norm in _with_norms(parameters):
            self._left[id(parameter)] = ref(grad), grad._version, norm

    def changed(self, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        """The parameters whose gradients are others than was noted, and more than zeros.

        Args:
            parameters: Those to look at. What was not noted had no gradient.
        """
        norms = _with_norms if self._has_norms else _without_norms
        for parameter, grad, norm in norms(parameters):
            found = self._left.get(id(parameter))
            is_left = (
                found is not None
                and found[0]() is grad
                and (found[1], found[2]) == (grad._version, norm)
            )
            if not is_left and (grad.layout != torch.strided or bool(grad.any())):
                yield parameter

    def tell(self, name: str) -> None:
        """Refuse an update of gradients that were changed on each replica, or warn of it once.

        Args:
            name: The user's name of a parameter that has one.

        Raises:
            UserError: The training is deterministic.
        """
        if self._deterministic:
            raise UserError(
                f"the gradient of {name!r} was changed beside strategy.backward(), by another "
                "backward() or by hand: each replica changed its own part of it",
                ADVICE,
            )
        if not self._said:
            self._said = True
            warn(
                "gradients were changed beside strategy.backward(), by another backward() or by "
                "hand: each replica changed its own part of them. All but a fixed factor makes "
                "other numbers than on one device. %s",
                ADVICE,
            )


_Found = tuple[nn.Parameter, Tensor, str]


def _without_norms(parameters: Iterable[nn.Parameter]) -> list[_Found]:
    """The parameters that have a gradient, and these."""
    return [(p, grad, "") for p in parameters if (grad := p.grad) is not None]


def _with_norms(parameters: Iterable[nn.Parameter]) -> list[_Found]:
    """The same, with norms: as a text, where NaN equals itself."""
    pairs = [(p, p.grad) for p in parameters if p.grad is not None]
    quick = [grad.detach() for _, grad in pairs if grad.is_cpu and grad.layout == torch.strided]
    norms = iter(torch._foreach_norm(quick, 1) if quick else ())
    return [
        (p, g, str(next(norms).item()) if g.is_cpu and g.layout == torch.strided else "")
        for p, g in pairs
    ]


_of_optimizers: WeakKeyDictionary[Optimizer, Edits] = WeakKeyDictionary()


@contextmanager
def rewriting(optimizer: Optimizer | None) -> Iterator[None]:
    """A block in which gradients are moved, or scaled by what is the same everywhere.

    Args:
        optimizer: Whose gradients; what was no change before is none afterwards.
    """
    edits = None if optimizer is None else _of_optimizers.get(optimizer)
    if edits is None or optimizer is None or not edits._left:  # as in `fit`
        yield
        return
    parameters = optimizer_parameters(optimizer)
    changed = {id(parameter) for parameter in edits.changed(parameters)}
    yield
    edits.note(p for p in parameters if id(p) not in changed)


@cache
def _install() -> None:
    """Have torch's scalers say that they divide by their scale, and agree on what is not finite.

    A task whose part alone has an infinity would leave out the update that the others make. One
    without rows has found nothing, which a scaler takes for a mistake. Optimizers that divide by
    the scale themselves would do so after the norm is clipped.
    """

    def agrees(scaler: GradScaler, optimizer: Optimizer) -> bool:
        is_own = scaler.is_enabled() and not isinstance(scaler, ReducedScaler)
        return is_own and optimizer in _of_optimizers

    unscale: Any = GradScaler.unscale_
    step: Any = GradScaler.step

    @wraps(unscale)
    def unscale_(self: Any, optimizer: Optimizer) -> None:
        with rewriting(optimizer):
            unscale(self, optimizer)
        if agrees(self, optimizer):
            state = self._per_optimizer_states[id(optimizer)]
            found: dict[torch.device, Tensor] = state["found_inf_per_device"]
            own = torch.zeros((), device=self._scale.device)
            for each in found.values():
                own += each.to(own.device)
            largest = _of_optimizers[optimizer].largest()
            whole = own if largest is None else largest(own)
            devices = found or {own.device}
            state["found_inf_per_device"] = {device: whole.to(device) for device in devices}

    @wraps(step)
    def step_(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if agrees(self, optimizer):
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
        return step(self, optimizer, *args, **kwargs)

    GradScaler.unscale_ = unscale_  # type: ignore[method-assign]
    GradScaler.step = step_  # type: ignore[method-assign]
