"""``optimizer.step()`` as a user types it, where a strategy makes the updates.

One replica alone would step with its own gradients, and train apart from the others without a
word. So a prepared optimizer asks its strategy first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.optim import Optimizer

from spartito.errors import UserError

Asked = Callable[[Optimizer, Any], bool]
"""Gets an optimizer and what its ``step`` was given; whether it has made the step."""


class _Inquiry:
    """Who is asked before a step, and whether the step under way is the strategy's own."""

    def __init__(self) -> None:
        self.asked: Callable[[], Asked | None] = lambda: None
        self.after: Asked | None = None
        self.is_open = False

    @property
    def now(self) -> Asked | None:
        """Who is asked now."""
        return self.asked() or self.after


_INQUIRY = "_spartito_inquiry"


def ask_before_steps(optimizer: Optimizer, asked: Asked, after: Asked | None = None) -> None:
    """Have ``asked``, a bound method, decide what ``optimizer.step()`` does.

    Its object is not kept alive; without it the step is the optimizer's own again, or ``after`` is
    asked.

    Args:
        optimizer: Whose ``step``. Of several calls the last one holds.
        asked: Returns whether it has made the step; if not, the optimizer does.
        after: A plain function, likewise.
    """
    if _INQUIRY not in optimizer.__dict__:
        optimizer.__dict__[_INQUIRY] = _Inquiry()
        optimizer.step = _asking(optimizer)  # type: ignore[method-assign]
    inquiry = optimizer.__dict__[_INQUIRY]
    inquiry.asked, inquiry.after = weakref.WeakMethod(asked), after


def stop_asking(optimizer: Optimizer, asked: Asked) -> None:
    """Ask no more, as without the object of ``asked``, unless somebody else is asked by now.

    Args:
        optimizer: Any.
        asked: Who is asked no more.
    """
    inquiry = optimizer.__dict__.get(_INQUIRY)
    if inquiry is not None and inquiry.asked() == asked:
        inquiry.asked = lambda: None


def ask_nobody(optimizer: Optimizer) -> None:
    """Make ``optimizer.step()`` its own again, whoever would be asked.

    Args:
        optimizer: Any.
    """
    inquiry = optimizer.__dict__.get(_INQUIRY)
    if inquiry is not None:
        inquiry.asked, inquiry.after = (lambda: None), None


def asked_before(optimizer: Optimizer) -> Asked | None:
    """Who is asked before its steps.

    Args:
        optimizer: Any.
    """
    inquiry = optimizer.__dict__.get(_INQUIRY)
    return None if inquiry is None else inquiry.now


@contextmanager
def stepping(optimizer: Optimizer) -> Iterator[None]:
    """A block in which a step of ``optimizer`` is part of an update, and nobody is asked.

    Args:
        optimizer: Any.
    """
    inquiry = optimizer.__dict__.get(_INQUIRY)
    if inquiry is None:
        yield
        return
    before, inquiry.is_open = inquiry.is_open, True
    try:
        yield
    finally:
        inquiry.is_open = before


def asks_first(step: Callable[..., Any]) -> bool:
    """Whether ``step`` asks first, and then does what is in its ``__wrapped__``."""
    return step in _asking_steps


def _asking(optimizer: Optimizer) -> Callable[..., Any]:
    """The optimizer's ``step``, which asks first. A plain function: it keeps nothing alive."""
    own: Any = optimizer.step
    method = hasattr(own, "__func__")  # not where a schedule has wrapped it
    plain = own.__func__ if method else own  # a method would keep the optimizer alive
    here, inquiry = weakref.ref(optimizer), optimizer.__dict__[_INQUIRY]

    @wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        found = here()
        assert found is not None, "its method was called"
        asked = None if inquiry.is_open else inquiry.now
        if asked is not None and asked(found, (*args, *kwargs.values())):
            return None
        found._opt_called = True  # type: ignore[attr-defined] # schedules look for it
        return plain(found, *args, **kwargs) if method else plain(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # it marks what that marks
    _asking_steps.add(step)
    return step


_asking_steps: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def stepped_apart(optimizer: Optimizer, tasks: int) -> UserError:
    """The error for a step with gradients that the strategy knows nothing of."""
    return UserError(
        f"{type(optimizer).__name__}.step() without strategy.backward(): each of {tasks} tasks "
        "would make an update of its own",
        "Write strategy.backward(loss, batch) in place of loss.backward(). Then optimizer.step() "
        "does what strategy.update(optimizer) does.",
    )
