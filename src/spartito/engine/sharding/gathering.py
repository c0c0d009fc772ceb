"""Makes blocks whole while their modules compute, forward and backward, and frees them again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from spartito.engine.sharding.hidden_parameters import computes_in
from spartito.engine.sharding.homes import GatheredHome, Home, whole_homes


def gather_around(homes: Sequence[GatheredHome]) -> list[RemovableHandle]:
    """Hook the modules of these blocks, and return the hooks.

    The order of calls must be the same on all replicas.
    """
    by_module: dict[nn.Module, list[GatheredHome]] = {}
    for home in homes:
        by_module.setdefault(home.members.module, []).append(home)
    made = []
    for module, blocks in by_module.items():
        around = _Around(blocks)
        before, after = torch.compiler.disable(around.before), torch.compiler.disable(around.after)
        made.append(module.register_forward_pre_hook(before, prepend=True))
        made.append(module.register_forward_hook(after, always_call=True))
    return made


class Shown:
    """What the ``state_dict`` of a model has for the parameters of its blocks."""

    def __init__(self) -> None:
        self.as_shards = False
        """This replica's elements, flat; else copies of the whole, which all replicas ask for."""
        self.homes: list[Home] = []
        self._watches = False

    def watch(self, model: nn.Module, homes: Sequence[Home]) -> None:
        """Add blocks of ``model``; some may have come with another model."""
        if not self._watches:
            model.register_state_dict_post_hook(partial(Shown._replace, self))
        self._watches = True
        self.homes += [home for home in homes if home not in self.homes]

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
                home.release()
            for parameter, value in zip(home.parameters, values, strict=True):
                state |= dict.fromkeys(names.get(id(parameter), ()), value)


class _Around:
    """The hooks of one module, which may be called inside of itself.

    What autograd saves of a block for the backward pass it has to ask for then, on whatever way
    gradients come.
    """

    def __init__(self, homes: Sequence[GatheredHome]) -> None:
        self._homes, self._thread = homes, get_ident()
        self._saving: list[saved_tensors_hooks] = []  # of the calls that have not ended

    def before(self, module: nn.Module, given: Any) -> None:
        """Gather."""
        if computes_in(self._thread):
            for home in self._homes:
                home.gather()
            self._saving.append(saving())
            self._saving[-1].__enter__()

    def after(self, module: nn.Module, given: Any, output: Any) -> None:
        """Free."""
        if not computes_in(self._thread) or not self._saving:
            return
        self._saving.pop().__exit__()
        computing_again = torch._C._current_graph_task_id() != -1
        if not self._saving and not computing_again:
            for home in self._homes:
                home.free()


def saving() -> saved_tensors_hooks:
    """What autograd saves of a gathered block is that block; the rest as it is saved already."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: Tensor) -> tuple[Any, Any]:
        if tensor.layout is torch.strided:
            home = whole_homes.get(tensor.untyped_storage().data_ptr())
            if home is not None:
                return home.saved(tensor), None
        return None, tensor if outer is None else outer[0](tensor)

    def unpack(packed: tuple[Any, Any]) -> Any:
        again, saved = packed
        if again is not None:
            return again()
        return saved if outer is None else outer[1](saved)

    return saved_tensors_hooks(pack, unpack)
