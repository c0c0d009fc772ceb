"""The optimizer's state in slots: one for each long tensor that a server's optimizer sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
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

from spartito.ps.protocol.layout import Layout, Part, Run, Span, runs
from spartito.ps.protocol.memory import dtype_of, flat

ELEMENTWISE = (
    ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop,
)  # fmt: skip
"""Optimizers whose update of an element looks at that element alone: tensors may be cut."""
COUNTERS = ("step", "eta", "mu", "mu_product")
"""State of elementwise optimizers that is one number for all elements of a parameter."""
State = dict[tuple[int, str], Tensor]
"""The optimizer's state: tensor ``key`` of slot number n."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the optimizer may work on parts of tensors; unknown ones get whole tensors."""
    return type(optimizer) in ELEMENTWISE


def slots(layout: Layout, span: Span, whole: bool) -> list[Run]:
    """What the optimizer sees as single parameters: whole runs, or tensor by tensor."""
    learned = [run for run in runs(layout, span) if run.learns]
    if not whole:
        return learned
    return [
        Run(run.dtype, run.group, part.offset, _end(run, part), (part,))
        for run in learned
        for part in run.parts
    ]


def merge_state(found: Sequence[Run], by_entry: Sequence[Mapping[str, Any]]) -> State:
    """The state per tensor, in the order of the layout's entries, as that of slots.

    A slot counts as the one of its tensors does that was updated most often.
    """
    state: State = {}
    for number, run in enumerate(found):
        for key in dict.fromkeys(key for part in run.parts for key in by_entry[part.entry]):
            values = [by_entry[part.entry].get(key) for part in run.parts]
            known = [torch.as_tensor(value) for value in values if value is not None]
            if _is_long(key, run, known):
                parts = [
                    known[0].new_zeros(part.end - part.begin)  # never used, so without a state
                    if value is None
                    else flat(value)[part.begin : part.end]
                    for value, part in zip(values, run.parts, strict=True)
                ]
                state[number, key] = torch.cat(parts)
            else:
                at = max(run.parts, key=lambda part: float(by_entry[part.entry].get("step", -1)))
                state[number, key] = torch.as_tensor(by_entry[at.entry].get(key, known[0])).clone()
    return state


def split_state(found: Sequence[Run], state: State) -> Iterator[tuple[Part, str, Tensor]]:
    """The state of slots as that of the parts in them: `merge_state` undone for one server."""
    for (number, key), value in state.items():
        run = found[number]
        for part in run.parts:
            here = within(run, part)
            whole = value.numel() != here.stop  # a number, or a shape of the optimizer's own
            whole = whole and len(run.parts) == 1
            yield part, key, value if whole or not value.dim() else value.reshape(-1)[here]


def _is_long(key: str, run: Run, values: Sequence[Tensor]) -> bool:
    """Whether this state has a value for each element, or one number for all of them.

    A parameter may have no dimension itself; then only the name tells.
    """
    return any(value.dim() for value in values) or (key not in COUNTERS and len(run.parts) > 1)


def within(run: Run, part: Part) -> slice:
    """Where the elements of a part are in its run."""
    first = (part.offset - run.start) // dtype_of(run.dtype).itemsize
    return slice(first, first + part.end - part.begin)


def _end(run: Run, part: Part) -> int:
    return part.offset + (part.end - part.begin) * dtype_of(run.dtype).itemsize


def slot_of(name: str) -> tuple[int, str]:
    """Slot and key of a tensor of the state in a `Store.copy`."""
    number, _, key = name.partition("/")
    return int(number), key
