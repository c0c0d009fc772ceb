"""Graphs that begin at the loss: what it is divided by is told without gradients, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from spartito.engine.losses.loss_means import ONE


class BeginAtLosses(TorchFunctionMode):
    """A block without gradients, in which a graph begins at the first loss of torch's.

    So a model that computes its own loss tells what that was divided by in an evaluation too, and
    keeps nothing of its layers.

    Args:
        size: How many examples the model gets.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._had_gradients = torch.is_grad_enabled()
        self._picked_from: list[Tensor] = []  # kept, so that no other tensor gets their memory

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if self._size == 1 and picks_first(func, args, named):
            self._picked_from.append(args[0])
        if func not in _LOSSES or not args or named.get("reduction") == "none":
            return func(*args, **named)
        if not self._had_gradients and not torch.is_grad_enabled():
            torch.set_grad_enabled(True)  # also for what the loss is divided by later
        first, *others = args
        if not isinstance(first, Tensor) or first.requires_grad or not first.is_floating_point():
            return func(*args, **named)
        found = func(first.detach().requires_grad_(), *others, **named)
        if isinstance(found, Tensor) and found.grad_fn is not None and self._is_one(first):
            notes: Any = found.grad_fn.metadata
            notes[ONE] = True
        return found

    def _is_one(self, scores: Tensor) -> bool:
        """Whether they are those of one example, picked from all."""
        base = scores._base
        if base is None or not base.dim() or base.shape[0] % max(self._size, 1):
            return False
        if self._size == 1:  # where a view of all has as many elements
            return any(each is base or each._base is base for each in self._picked_from)
        return scores.numel() * self._size == base.numel()

    def __exit__(self, *error: Any) -> None:
        torch.set_grad_enabled(self._had_gradients)
        super().__exit__(*error)  # type: ignore[no-untyped-call]


_PICKS = {
    Tensor.select, torch.select, Tensor.narrow, torch.narrow, Tensor.unbind, torch.unbind,
    Tensor.__iter__,
}  # fmt: skip


def picks_first(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Whether an operation picks some along the first dim of a tensor, where the examples are."""
    if not args or not isinstance(args[0], Tensor) or not args[0].dim():
        return False
    if func is Tensor.__getitem__:
        first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        return isinstance(first, int) or (isinstance(first, slice) and first != slice(None))
    dim = args[1] if len(args) > 1 else named.get("dim", 0)
    return func in _PICKS and dim in (0, -args[0].dim())


_LOSSES = frozenset((functional.cross_entropy, functional.nll_loss))
"""Those that count by themselves, whatever was picked for them before."""
