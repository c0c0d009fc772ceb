"""Makes units whole while their modules compute, forward and backward, and frees them again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from spartito.engine.sharding.homes import Home


def gather_around(model: nn.Module, homes: Sequence[Home]) -> None:
    """Hook the modules of these units of ``model``, and its ``state_dict``.

    The order of calls must be the same on all replicas.
    """
    by_module: dict[nn.Module, list[Home]] = {}
    for home in homes:
        by_module.setdefault(home.members.module, []).append(home)
    for module, units in by_module.items():
        around = _Around(units)
        module.register_forward_pre_hook(around.before, prepend=True)
        module.register_forward_hook(around.after, always_call=True)
    for home in homes:
        model.register_state_dict_post_hook(partial(_complete, home))


def _complete(
    home: Home, model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Put copies of a unit's values into what ``state_dict`` returns; all replicas call it."""
    own = {id(parameter): parameter for parameter in home.parameters}
    names = {name: own[id(p)] for name, p in model.named_parameters(remove_duplicate=False)
             if id(p) in own and prefix + name in state}  # fmt: skip
    home.gather()
    copies = {id(parameter): parameter.detach().clone() for parameter in names.values()}
    state |= {prefix + name: copies[id(parameter)] for name, parameter in names.items()}
    home.free()


class _Around:
    """The hooks of one module, which may be called inside of itself."""

    def __init__(self, homes: Sequence[Home]) -> None:
        self._homes, self._depth = homes, 0

    def before(self, module: nn.Module, given: Any) -> None:
        self._depth += 1
        self._gather()

    def after(self, module: nn.Module, given: Any, output: Any) -> None:
        self._depth -= 1
        if torch.is_grad_enabled():
            tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
            if tensors:
                register_multi_grad_hook(tensors, lambda _: self._gather(), mode="any")
        if not self._depth:
            for home in self._homes:
                home.free()

    def _gather(self) -> None:
        for home in self._homes:
            home.gather()


def _tensors(output: Any) -> list[Tensor]:
    """Those in nested tuples, lists and dicts."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, tuple | list):
        return [tensor for part in output for tensor in _tensors(part)]
    return []
