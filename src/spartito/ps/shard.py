"""One server's part of the flat vector: its memory, the optimizer on it, and what it applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from spartito.ps.layout import BUFFER, Layout, Part, Run, Span, runs
from spartito.ps.vector import allocate, dtype_of, flat

ELEMENTWISE = (
    ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop,
)  # fmt: skip
"""Optimizers whose update of an element looks at that element alone: tensors may be cut."""

SETTINGS = (bool, int, float, str, list, tuple, type(None))
"""What an option of a parameter group is, to be sent along with a push."""

State = dict[tuple[int, str], Tensor]
"""The optimizer's state: tensor ``key`` of slot number n."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the optimizer may work on pieces of tensors; unknown ones get whole tensors."""
    return type(optimizer) in ELEMENTWISE


def slots(layout: Layout, span: Span, whole: bool) -> list[Run]:
    """What the optimizer sees as single parameters: whole runs, or tensor by tensor."""
    learned = [run for run in runs(layout, span) if run.group != BUFFER]
    if not whole:
        return learned
    return [
        Run(run.dtype, run.group, part.offset, _end(run, part), (part,))
        for run in learned
        for part in run.parts
    ]


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group: learning rate, decay and what else it has."""
    return [
        {
            name: float(value) if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params" and isinstance(value, (*SETTINGS, Tensor))
        }
        for group in optimizer.param_groups
    ]


class Shard:
    """The values of one span, updated in place by the user's own optimizer.

    ``optimizer`` is rebound from the user's parameters to few long ones that lie here.
    ``values`` is uint8 ``(bytes of the span,)``.
    """

    def __init__(
        self, layout: Layout, span: Span, optimizer: Optimizer, tensors: Sequence[Tensor]
    ) -> None:
        self.layout, self.span, self.optimizer = layout, span, optimizer
        self.values = allocate(span)
        self.slots = slots(layout, span, not is_elementwise(optimizer))
        self._kept = [run for run in runs(layout, span) if run.group == BUFFER]
        self._parameters = [nn.Parameter(self._view(self.values, run)) for run in self.slots]
        self._rebind(tensors)

    def update(self, push: Tensor, absent: Sequence[int] = (), rate: float = 1.0) -> None:
        """One step of the optimizer with the gradients in ``push``, uint8 ``(bytes,)``.

        The entries ``absent`` have no gradient and stay as they are. ``rate`` scales the
        learning rate of this update. Buffers change by what ``push`` holds at their place.
        """
        kept = self._keep(absent) if absent else []
        for parameter, run in zip(self._parameters, self.slots, strict=True):
            parameter.grad = self._view(push, run)
        rates = [group["lr"] for group in self.optimizer.param_groups] if rate != 1.0 else []
        for group, own in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = own * rate
        self.optimizer.step()
        for group, own in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = own
        for tensor, old in kept:
            tensor.copy_(old)
        for run in self._kept:
            values, change = self._view(self.values, run), self._view(push, run)
            if values.dtype == torch.bool:
                values.copy_(change)
            else:
                values.add_(change)

    def mix(self, total: Tensor, push: Tensor, weight: float) -> None:
        """Add ``weight`` times the gradients of ``push``, and once its changes, to ``total``."""
        for run in self.slots:
            self._view(total, run).add_(self._view(push, run), alpha=weight)
        for run in self._kept:
            if run.dtype != "bool":
                self._view(total, run).add_(self._view(push, run))

    def divide(self, total: Tensor, weight: float, count: int) -> None:
        """Make the sum of `mix` a mean: gradients by their weight, changes by their count."""
        for run in self.slots:
            self._view(total, run).mul_(1 / weight if weight else 0.0)
        for run in self._kept:
            view = self._view(total, run)
            if run.dtype != "bool":
                view.div_(count, rounding_mode=None if view.is_floating_point() else "floor")

    def clip(self, push: Tensor, norm: float) -> None:
        """Scale the gradients so that their global L2 norm is at most ``norm``."""
        grads = [self._view(push, run) for run in self.slots]
        total = torch.nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, torch.clamp(norm / (total + 1e-6), max=1.0))

    def set(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Take over the options of the parameter groups, as `settings` answers them."""
        for group, new in zip(self.optimizer.param_groups, options, strict=True):
            for name, value in new.items():
                group[name] = tuple(value) if isinstance(group.get(name), tuple) else value

    def state(self) -> State:
        """The optimizer's tensors, by slot and key; numbers are 0-dim tensors. Not copied."""
        return {
            (number, key): value if isinstance(value, Tensor) else torch.tensor(value)
            for number, parameter in enumerate(self._parameters)
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor | int | float)
        }

    def load_state(self, state: State) -> None:
        """Take back what `state` answered."""
        self.optimizer.state.clear()
        for (number, key), value in state.items():
            shape = self._parameters[number].shape
            tensor = value.reshape(shape) if value.dim() else value
            self.optimizer.state[self._parameters[number]][key] = tensor.clone()

    def _view(self, memory: Tensor, run: Run) -> Tensor:
        """A run in some memory of the span, shaped as the optimizer sees it."""
        start = run.start - self.span.start
        view = memory[start : start + run.stop - run.start].view(dtype_of(run.dtype))
        if run.group == BUFFER or is_elementwise(self.optimizer):
            return view
        return view.view(self.layout.entries[run.parts[0].entry].shape)

    def _rebind(self, tensors: Sequence[Tensor]) -> None:
        """Point the optimizer's groups, and the state that a fresh one has, at our tensors."""
        begun = dict(self.optimizer.state)
        state = merge_state(self.slots, [begun.get(tensor, {}) for tensor in tensors])
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = [
                parameter
                for parameter, run in zip(self._parameters, self.slots, strict=True)
                if run.group == number
            ]
        self.load_state(state)

    def _keep(self, absent: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """The values and the state of these entries, each with a copy to put back."""
        missing, kept = frozenset(absent), []
        for parameter, run in zip(self._parameters, self.slots, strict=True):
            state = self.optimizer.state.get(parameter, {}).values()
            long = [v for v in state if isinstance(v, Tensor) and v.numel() == parameter.numel()]
            for part in run.parts:
                if part.entry in missing:
                    here = _within(run, part)
                    for tensor in (parameter.data, *long):
                        piece = tensor.view(-1)[here]
                        kept.append((piece, piece.clone()))
        return kept


def merge_state(found: Sequence[Run], by_entry: Sequence[Mapping[str, Any]]) -> State:
    """The state per tensor, in the order of the layout's entries, as that of slots."""
    state: State = {}
    for number, run in enumerate(found):
        for key in dict.fromkeys(key for part in run.parts for key in by_entry[part.entry]):
            values = [by_entry[part.entry].get(key) for part in run.parts]
            known = [torch.as_tensor(value) for value in values if value is not None]
            if known[0].dim():
                pieces = [
                    known[0].new_zeros(part.end - part.begin)  # never used, so without a state
                    if value is None
                    else flat(value)[part.begin : part.end]
                    for value, part in zip(values, run.parts, strict=True)
                ]
                state[number, key] = torch.cat(pieces)
            else:  # a step counter
                state[number, key] = torch.stack(known).amax().clone()
    return state


def split_state(found: Sequence[Run], state: State) -> Iterator[tuple[Part, str, Tensor]]:
    """The state of slots as that of the parts in them: `merge_state` undone for one server."""
    for (number, key), value in state.items():
        run = found[number]
        for part in run.parts:
            yield part, key, value.reshape(-1)[_within(run, part)] if value.dim() else value


def _within(run: Run, part: Part) -> slice:
    """Where the elements of a part are in its run."""
    first = (part.offset - run.start) // dtype_of(run.dtype).itemsize
    return slice(first, first + part.end - part.begin)


def _end(run: Run, part: Part) -> int:
    return part.offset + (part.end - part.begin) * dtype_of(run.dtype).itemsize
