"""Where the modules that look beyond their own replica find out about the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from spartito.collectives.collective import Collective

UNKNOWN = -1
"""The offset of rows of which nobody knows where they lie in the batch."""


@dataclass
class StepContext:
    """What one forward pass belongs to: who takes part, and which rows of the batch are here.

    ``calls`` counts the forward passes in this step; ``drawn`` tells by key how each random
    tensor of them holds the examples.
    """

    collective: Collective
    seed: int
    step: int
    global_size: int
    offsets: Tensor
    calls: int = 0
    drawn: dict[int, Any] = field(default_factory=dict)


_current: StepContext | None = None


def current() -> StepContext | None:
    """The context of the step that runs now; None outside of one."""
    return _current


def enter(context: StepContext | None) -> None:
    """Make ``context`` the present one until the next call: for loops that users write."""
    global _current
    _current = context


def leave(collective: Collective) -> None:
    """End the present context if it is one of these replicas.

    Args:
        collective: They make no more steps; others may be in the middle of one.
    """
    if _current is not None and _current.collective is collective:
        enter(None)


@contextmanager
def within(context: StepContext | None) -> Iterator[None]:
    """Make ``context`` the present one for a block."""
    before = _current
    enter(context)
    try:
        yield
    finally:
        enter(before)
