"""What a model keeps from one forward pass to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = frozenset({bool, int, float, str, FunctionType, BuiltinFunctionType})


def settings_of(model: nn.Module) -> tuple[Any, ...]:
    """What a user may set between two steps and a forward pass may follow.

    Which modules there are, the numbers, words and functions that they hold (a mode, the rate of a
    dropout, the stride of a convolution), and which parameters learn. Every step asks: no name is
    made, and no module is called.
    """
    found: list[Any] = []
    waiting, seen = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        own = module.__dict__
        found.append(type(module))
        found += [
            value
            for value in own.values()
            if (kind := type(value)) in _PLAIN
            or (kind is tuple and _PLAIN.issuperset(map(type, value)))
        ]
        found += [each is not None and each.requires_grad for each in own["_parameters"].values()]
        for inner in own["_modules"].values():
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)
    return tuple(found)


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
