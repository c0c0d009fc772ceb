"""Makes blocks whole while their modules compute, forward and backward, and frees them again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from spartito.engine.sharding.homes import Home


def gather_around(model: nn.Module, homes: Sequence[Home]) -> None:
    """Hook the modules of these blocks of ``model``.

    The order of calls must be the same on all replicas.
    """
    by_module: dict[nn.Module, list[Home]] = {}
    for home in homes:
        by_module.setdefault(home.members.module, []).append(home)
    for module, blocks in by_module.items():
        around = _Around(blocks)
        module.register_forward_pre_hook(torch.compiler.disable(around.before), prepend=True)
        module.register_forward_hook(torch.compiler.disable(around.after), always_call=True)


class Shown:
    """What the ``state_dict`` of a model has for the parameters of its blocks."""

    def __init__(self) -> None:
        self.as_shards = False
        """This replica's elements, flat; else copies of the whole, which all replicas ask for."""
        self.homes: list[Home] = []

    def watch(self, model: nn.Module, homes: Sequence[Home]) -> None:
        """Add blocks of ``model``."""
        if not self.homes:
            model.register_state_dict_post_hook(partial(Shown._replace, self))
        self.homes += homes

    def _replace(self, model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                names.setdefault(id(parameter), []).append(prefix + name)
        for home in self.homes:
            if self.as_shards:
                values = home.sections
            elif home.is_shared:
                continue
            else:
                home.gather()
                values = [parameter.detach().clone() for parameter in home.parameters]
                home.free()
            for parameter, value in zip(home.parameters, values, strict=True):
                state |= dict.fromkeys(names.get(id(parameter), ()), value)


class _Around:
    """The hooks of one module, which may be called inside of itself.

    Calls in other threads only count random numbers (`engine.randomness`): all values do.
    """

    def __init__(self, homes: Sequence[Home]) -> None:
        self._homes, self._depth, self._thread = homes, 0, get_ident()

    def before(self, module: nn.Module, given: Any) -> None:
        """Gather."""
        if get_ident() == self._thread:
            self._depth += 1
            self._gather()

    def after(self, module: nn.Module, given: Any, output: Any) -> None:
        """Free, and gather again when gradients come."""
        if get_ident() != self._thread:
            return
        self._depth -= 1
        if torch.is_grad_enabled():
            tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
            if tensors:
                register_multi_grad_hook(tensors, lambda _: self._gather(), mode="any")
        computing_again = torch._C._current_graph_task_id() != -1
        if not self._depth and not computing_again:
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
