"""Batches of one size, for devices that compile a program for each shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from spartito.accelerators import generator_states, set_generator_states
from spartito.data.reading.collate import count_rows, leaves, rows
from spartito.engine.losses.loss import forward, mapped
from spartito.notes import note


@dataclass(slots=True)
class _Full:
    """The largest batch of a shape that a model had.

    Attributes:
        size: Its examples.
        example: The input of its first one.
        can_fill: Whether smaller ones may be filled up, by the modes of the model (`_modes`).
    """

    size: int = 0
    example: Any = None
    can_fill: dict[int, bool] = field(default_factory=dict)


class FullBatches:
    """Runs models on batches that are as large as the largest before: smaller ones are filled up.

    What fills them are copies of their first example, and only the rows of the others' output are
    given back: no loss or metric sees the copies, and their gradient is 0. So the model is compiled
    once, and what comes after it, which is little, once more.

    Models whose rows depend on each other get batches as they are: those with BatchNorm in
    training, and those whose output is another one beside other copies. That is tried once for
    a model, and again when one of its modules changes its mode or is another one, with two forward
    passes that change nothing.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, dict[Any, _Full]] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, data: Any, has_loss: bool = True) -> Any:
        """The model's output, as `spartito.engine.losses.loss.forward` has it.

        A model that computes its own loss gets batches as they are: its mean is over all rows.

        Args:
            model: Any module.
            data: A batch with rows.
            has_loss: Whether there is a loss function.

        Returns:
            The output for the rows of the batch.
        """
        if not has_loss or not (inputs := list(leaves(_input(data)))):
            return forward(model, data, has_loss)
        size = count_rows(data)
        # What a program is compiled for, beside the number of rows.
        shape = (model.training, *((t.shape[1:], t.dtype, t.dim()) for t in inputs))
        full = self._known.setdefault(model, {}).setdefault(shape, _Full())
        if size >= full.size:
            if size > full.size:
                full.size, full.example = size, rows(_input(data), lambda t: _first(t).clone())
            return forward(model, data)
        filled = _filled(_input(data), _input(data), size, full.size)
        modes = _modes(model)
        can_fill = full.can_fill.get(modes)
        if can_fill is None:
            other = _filled(_input(data), full.example, size, full.size)
            can_fill = full.can_fill[modes] = _has_rows(model, inputs, size) and _agree(
                model, filled, other, size, full.size
            )
            if not can_fill:
                note(
                    "batches of %d are not filled up to %d: this model's rows depend on each "
                    "other, or its output has other rows than its input; each size is compiled",
                    *(size, full.size),
                )
        if not can_fill:
            return forward(model, data)
        return mapped(forward(model, filled), lambda t: t[:size])


def _modes(model: nn.Module) -> int:
    """Of which classes its modules are, and which of them train."""
    return hash(tuple((type(module), module.training) for module in model.modules()))


def _input(data: Any) -> Any:
    """What a model gets of a batch: as a tuple or dict of which `forward` takes all."""
    if isinstance(data, Mapping):
        return {name: part for name, part in data.items() if name != "y"}
    return tuple(data[:1]) if isinstance(data, tuple | list) else (data,)


def _first(tensor: Tensor) -> Tensor:
    return tensor[:1] if tensor.dim() else tensor


def _filled(data: Any, example: Any, size: int, full: int) -> Any:
    """``data`` with copies of an example behind its rows."""
    examples = iter(list(leaves(example)))

    def fill(tensor: Tensor) -> Tensor:
        copy = _first(next(examples))
        if not tensor.dim():
            return tensor
        return torch.cat([tensor, copy.expand(full - size, *tensor.shape[1:])])

    return rows(data, fill)


def _has_rows(model: nn.Module, inputs: list[Tensor], size: int) -> bool:
    """Whether it may be tried: it is not certain that rows of the input depend on each other."""
    coupled = any(isinstance(m, _BatchNorm) and m.training for m in model.modules())
    return not coupled and all(t.dim() and t.shape[0] == size for t in inputs)


def _agree(model: nn.Module, one: Any, other: Any, size: int, full: int) -> bool:
    """Whether a model says the same of the first rows, whatever is behind them."""
    found = []
    for data in (one, other):
        # With a graph where training has one, whose programs are compiled already.
        with _unchanged(model) as buffers:
            output = forward(_Called(model, buffers), data)
            if any(not torch.equal(value, buffers[n]) for n, value in model.named_buffers()):
                return False  # it keeps statistics of what it sees
        parts = list(leaves(_plain(output)))
        if not parts or any(not t.dim() or t.shape[0] != full for t in parts):
            return False
        found.append([t.detach()[:size] for t in parts])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class _Called(nn.Module):
    """A model with buffers of its own."""

    def __init__(self, model: nn.Module, buffers: dict[str, Tensor]) -> None:
        super().__init__()
        self.__dict__.update(called=model, values=buffers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.__dict__["called"], self.__dict__["values"], args, kwargs)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """A block after which generators are where they were; it gives copies of the buffers."""
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    states = generator_states(device)
    try:
        yield {name: buffer.clone() for name, buffer in model.named_buffers()}
    finally:
        set_generator_states(device, states)


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output
