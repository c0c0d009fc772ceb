"""Forward passes that are made to learn how a model works, and are none of its training."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from spartito.data.reading.collate import rows_of as chosen

_trials = 0
_has_met = False


def is_trial() -> bool:
    """Whether the pass that runs leaves nothing behind."""
    return _trials > 0


def meets_nobody() -> bool:
    """Whether a call that meets other replicas is of a trial, which these may not make."""
    global _has_met
    _has_met = _has_met or is_trial()
    return is_trial()


@contextmanager
def watching_meetings() -> Iterator[Callable[[], bool]]:
    """A block of trials; what it yields tells whether one of them wanted to meet others."""
    global _has_met
    before, _has_met = _has_met, False
    try:
        yield lambda: _has_met
    finally:
        _has_met = before


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A block that leaves a model as it was, and the generators of the process.

    What its modules count is put back too: the steps of a schedule in ``self.step``, what is
    appended to a list of theirs, a generator of their own. And so is what a pass of this thread
    writes into parameters, as into a target network that follows.

    Args:
        model: Whose passes the block makes.
    """
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    held = [(vars(module), dict(vars(module))) for module in model.modules()]
    undo = [_restored(value) for _, before in held for value in before.values()]
    written = _Written(model)
    global _trials
    _trials += 1
    try:
        with written:
            yield
    finally:
        _trials -= 1
        written.put_back()
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


def rows_of(inputs: Any, size: int, count: int) -> Any:
    """``inputs`` with ``count`` rows in the tensors that have ``size``.

    Args:
        inputs: What a model is called with.
        size: The rows of a batch.
        count: As many as are wanted; where there are fewer, some come twice; where there is none,
            they are zeros.

    Returns:
        The same, or None where no tensor has so many rows.
    """

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == size:
            if not size:
                return value.new_zeros((count, *value.shape[1:]))
            return chosen(value.detach(), torch.arange(count, device=value.device) % size)
        return value

    if all(cut(value) is value for value in tree_leaves(inputs)):
        return None
    return tree_map(cut, inputs)


class _Written(TorchDispatchMode):
    """Keeps what parameters were before something is written into them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of: dict[int, list[Tensor]] = {}
        held = [each for module in model.modules() for each in module._parameters.values()]
        for each in held:  # on a mesh `parameters` may show what they are parts of
            if each is not None and not nn.parameter.is_lazy(each) and _has_memory(each):
                self._of.setdefault(_memory(each), []).append(each)
        self._of.pop(0, None)  # of what has no values
        plain = [each for same in self._of.values() for each in same if type(each) is nn.Parameter]
        self._there = [(each, each.data) for each in plain]
        self._kept: list[tuple[Tensor, Tensor, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[position] if position < len(args) else kwargs.get(argument.name)
                    self._keep(given if isinstance(given, list | tuple) else [given])
        return func(*args, **kwargs)

    def _keep(self, tensors: Iterable[Any]) -> None:
        for each in tensors:
            if isinstance(each, Tensor) and _has_memory(each):
                of_memory = self._of.pop(_memory(each), ())
                self._kept += [(one, one.detach().clone(), one._version) for one in of_memory]

    def put_back(self) -> None:
        """Give parameters the values that they had."""
        for each, there in self._there:
            if each.data_ptr() != there.data_ptr():  # its .data was replaced
                each.data = there
        for parameter, value, version in self._kept:
            parameter.data.copy_(value)
            # A graph that has seen it need not know: it is what it was.
            torch._C._autograd._unsafe_set_version_counter((parameter,), (version,))


def _has_memory(tensor: Any) -> bool:
    """Whether it has values of its own, and stands for no other tensors."""
    return not is_traceable_wrapper_subclass(tensor)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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
