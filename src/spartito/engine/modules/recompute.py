"""Activations that are not kept for the backward pass, but computed again in it.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). Chosen modules compute their
forward pass twice; what they draw at random and their statistics are those of the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spartito.engine.logged import listening
from spartito.engine.modules.kept_values import keeping_values
from spartito.errors import UserError

Recompute = bool | int | type[nn.Module] | Sequence[type[nn.Module]] | Callable[[nn.Module], bool]
"""Which modules compute again: see `recompute`."""


def recompute(model: nn.Module, chosen: Recompute) -> list[str]:
    """Let modules of ``model`` compute their activations again in the backward pass.

    Their class is changed; names, parameters and numbers stay. A module inside of a chosen one is
    part of it.

    Args:
        model: Any module; it is changed in place.
        chosen: True: the entries of each Sequential and ModuleList that have submodules (blocks).
            A number: modules with so many bytes of parameters or more, none of whose submodules
            has as many. A module class, or several. A function that tells for a module.

    Returns:
        The names of the chosen modules.

    Raises:
        UserError: If none is chosen, which would keep all activations.
    """
    if chosen is False:
        return []
    found = dict(_chosen(model, _rule(model, chosen)))
    if not found:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise UserError(
            f"checkpoint_activations={chosen!r} chooses no module of {type(model).__name__}",
            f"Name classes of its modules ({', '.join(kinds[:8])}), or a number of bytes.",
        )
    for module in found.values():
        if _MARK not in vars(type(module)):
            kind: Any = type(module)
            module.__class__ = _computing_again(kind)
    return list(found)


_MARK = "_spartito_computes_again"


def _rule(model: nn.Module, chosen: Recompute) -> Callable[[nn.Module], bool]:
    if chosen is True:
        blocks = {
            id(entry)
            for each in model.modules()
            if isinstance(each, nn.Sequential | nn.ModuleList)
            for entry in each
            if any(True for _ in entry.children()) and any(True for _ in entry.parameters())
        }
        return lambda module: id(module) in blocks
    if isinstance(chosen, int):
        if chosen < 1:
            raise UserError(f"checkpoint_activations={chosen}", "Bytes of parameters: 1 or more.")
        least = chosen
        return lambda module: (
            _nbytes(module) >= least and all(_nbytes(each) < least for each in module.children())
        )
    kinds = (chosen,) if isinstance(chosen, type) else chosen
    if isinstance(kinds, Sequence) and not isinstance(kinds, str):
        classes = tuple(kinds)
        if classes and all(isinstance(k, type) and issubclass(k, nn.Module) for k in classes):
            return lambda module: isinstance(module, classes)
    elif callable(kinds):
        return kinds
    raise UserError(
        f"checkpoint_activations={chosen!r}",
        "True, a number of bytes, classes of modules, or a function of a module.",
    )


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _chosen(
    model: nn.Module, rule: Callable[[nn.Module], bool], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules for which the rule holds and that can be called."""
    for name, module in model.named_children():
        if type(module).forward is not nn.Module.forward and rule(module):
            yield prefix + name, module
        else:
            yield from _chosen(module, rule, f"{prefix}{name}.")


@cache
def _computing_again(kind: type[nn.Module]) -> type[nn.Module]:
    """A class like ``kind`` that keeps no activations while gradients are wanted."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _keeping_buffers(self)

        return checkpoint(
            kind.forward, self, *args, use_reentrant=False, context_fn=contexts, **kwargs
        )

    return type(
        kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, _MARK: True}
    )


@contextmanager
def _keeping_buffers(module: nn.Module) -> Iterator[None]:
    """A block after which the buffers, as running statistics, are what they were before.

    What is reported in it was reported already.
    """
    with keeping_values(module.buffers()), listening(None):
        yield
