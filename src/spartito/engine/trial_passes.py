"""Forward passes that are made to learn how a model works, and are none of its training."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A block that leaves a model as it was, and the generators of the process.

    What its modules count is put back too: the steps of a schedule in ``self.step``, what is
    appended to a list of theirs, a generator of their own.

    Args:
        model: Whose passes the block makes.
    """
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    held = [(vars(module), dict(vars(module))) for module in model.modules()]
    undo = [_restored(value) for _, before in held for value in before.values()]
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        for now, before in held:
            _put_back(now, before)
        for put_back in undo:
            if put_back is not None:
                put_back()
        for buffer, value in buffers:
            buffer.data.copy_(value)  # a graph that wants it finds what it saw


def _restored(value: Any) -> Callable[[], None] | None:
    """What puts ``value`` back in place; None for what is not known to change so."""
    if isinstance(value, dict):
        entries = dict(value)
        return lambda: _put_back(value, entries)
    if isinstance(value, list):
        items = list(value)
        return lambda: value.__setitem__(slice(None), items)
    if isinstance(value, set | deque):
        members = list(value)
        return lambda: _refill(value, members)
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: value.setstate(state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", bits)
    return None


def _refill(now: set[Any] | deque[Any], members: list[Any]) -> None:
    now.clear()
    (now.update if isinstance(now, set) else now.extend)(members)


def _put_back(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Have ``now`` the entries of ``before``, in its order; one that is as it was is left alone."""
    same = len(now) == len(before) and all(
        key == name and value is found
        for (key, value), (name, found) in zip(now.items(), before.items(), strict=True)
    )
    if not same:
        now.clear()
        now.update(before)
