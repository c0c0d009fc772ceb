"""What a model keeps from one forward pass to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = frozenset({bool, int, float, str, FunctionType, BuiltinFunctionType})
_HOLDERS = frozenset({tuple, list, dict, set})
_TENSORS = frozenset({"_parameters", "_buffers", "_modules"})
_MOST = 100
"""What a longer list holds is data, as a vocabulary, and no setting."""


def settings_of(model: nn.Module) -> tuple[Any, ...]:
    """What a user may set between two steps and a forward pass may follow.

    Which modules there are, the numbers, words and functions that they hold (a mode, the rate of a
    dropout, the stride of a convolution), also in short lists, dicts and sets, and which parameters
    learn. Every step asks: no name is made, and no module is called.
    """
    found: list[Any] = []
    waiting, seen = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        own = module.__dict__
        found.append(type(module))
        found += [
            value if kind in _PLAIN else _frozen(value, kind)
            for key, value in own.items()
            if (kind := type(value)) in _PLAIN
            or (kind in _HOLDERS and value and key not in _TENSORS)
        ]
        found += [each is not None and each.requires_grad for each in own["_parameters"].values()]
        for inner in own["_modules"].values():
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)
    return tuple(found)


def _frozen(value: Any, kind: type, depth: int = 3) -> Any:
    """What a list, dict, set or tuple holds that is plain, as a value that stays as it is."""
    if len(value) > _MOST or not depth:  # or it holds itself
        return kind
    if kind is set:
        return frozenset(each for each in value if type(each) in _PLAIN)
    return tuple(
        each if inner in _PLAIN else _frozen(each, inner, depth - 1) if inner in _HOLDERS else inner
        for each in (chain(*value.items()) if kind is dict else value)
        for inner in (type(each),)
    )


def held_by(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Numbers and tensors that modules have as plain attributes, by module and name."""
    return {
        (path, key): value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (int, float, Tensor))
    }


def differing(before: dict[tuple[str, str], Any], now: Any) -> list[tuple[str, str]]:
    """Where other tensors are, or other numbers."""
    return [
        key
        for key, value in now.items()
        if (old := before.get(key)) is not value
        and (old is None or isinstance(value, Tensor) or isinstance(old, Tensor) or old != value)
    ]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A block that leaves buffers and the generator as they were.

    Args:
        model: It has the buffers.
    """
    state = torch.default_generator.get_state()
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        for module, name, buffer, before in buffers:
            buffer.data.copy_(before)  # a graph that wants it finds what it saw
            module._buffers[name] = buffer
