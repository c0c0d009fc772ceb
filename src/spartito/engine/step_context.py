"""Where the modules that look beyond their own replica find out about the global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn

from spartito.collectives.collective import Collective

UNKNOWN = -1
"""The offset of rows of which nobody knows where they lie in the batch."""

T = TypeVar("T")

Weak = Callable[[], Callable[[], T] | None]
"""A weak reference to a method."""


def gone() -> None:
    """A weak reference to nothing."""


@dataclass
class StepContext:
    """What one forward pass belongs to: who takes part, and which rows of the batch are here.

    ``calls`` counts the forward passes in this step; ``drawn`` tells by key how each random
    tensor of them holds the examples. ``keep_apart`` (weak) is called where steps of another
    strategy come between; see `belong`.
    """

    collective: Collective
    seed: int
    step: int
    global_size: int
    offsets: Tensor
    calls: int = 0
    drawn: dict[int, Any] = field(default_factory=dict)
    keep_apart: Weak[object] = gone


_current: StepContext | None = None
_is_trial = False  # what is computed now is part of no step


def current() -> StepContext | None:
    """The context of the step that runs now; None outside of one."""
    return _current


def enter(context: StepContext | None) -> None:
    """Make ``context`` the present one until the next call: for loops that users write."""
    global _current
    before, _current = _current, context
    if before is None or context is None or before.collective is context.collective:
        return
    _keep_apart(before)
    _keep_apart(context)


def enter_none(collective: Collective) -> None:
    """End the present context: a batch comes whose models look at nothing of others.

    Args:
        collective: Whose batch. Models of other replicas come back to theirs.
    """
    if _current is not None and _current.collective is not collective:
        _keep_apart(_current)
    enter(None)


def _keep_apart(context: StepContext) -> None:
    if (keep_apart := context.keep_apart()) is not None:
        keep_apart()


def leave(collective: Collective) -> None:
    """End the present context if it is one of these replicas.

    Args:
        collective: They make no more steps; others may be in the middle of one.
    """
    if _current is not None and _current.collective is collective:
        enter(None)


@contextmanager
def within(context: StepContext | None) -> Iterator[None]:
    """Make ``context`` the present one for a block; None: what is in it is part of no step."""
    global _is_trial
    before, was_trial = _current, _is_trial
    enter(context)
    _is_trial = context is None
    try:
        yield
    finally:
        enter(before)
        _is_trial = was_trial


_OWN = "_spartito_step"


class _Own:
    """Has a model's forward passes belong to the last batch of its own strategy."""

    def __init__(self) -> None:
        self.find: Weak[StepContext | None] = gone
        self._before: list[StepContext | None] = []

    def begin(self, *_: object) -> None:
        """Before a forward pass."""
        find = None if _is_trial else self.find()
        own = None if find is None else find()
        self._before.append(_current)
        if own is not None and (_current is None or _current.collective is not own.collective):
            enter(own)

    def end(self, *_: object) -> None:
        """After it: it may be part of another model's."""
        if self._before:
            enter(self._before.pop())

    def __reduce__(self) -> Any:
        return _Own, ()


def belong(model: nn.Module, find: Weak[StepContext | None], *, again: bool = False) -> None:
    """Have forward passes of ``model`` belong to what ``find`` tells, whatever is present.

    Batches of several strategies may be taken in turns: the last one taken is not the one that each
    of their models is given.

    Args:
        model: A prepared one.
        find: Tells the last batch of its strategy, as long as there is one.
        again: Only where it belongs to another strategy's by now.
    """
    own = model.__dict__.get(_OWN)
    if own is None and again:
        return
    if own is None:
        own = model.__dict__[_OWN] = _Own()
        model.register_forward_pre_hook(own.begin, prepend=True)
        model.register_forward_hook(own.end, always_call=True)
    own.find = find
