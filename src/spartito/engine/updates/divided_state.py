"""What a strategy that divides an optimizer's state leaves of it: on each task another one.

A step of plain torch would go on with that, and begin anew what other tasks have: other numbers on
each, without a word. Or its kernel would write behind the end of a state that is shorter than its
parameter.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from spartito.engine.updates.optimizer_step import ask_nobody, asked_before
from spartito.engine.updates.optimizers import LOADING
from spartito.errors import UserError

_watched: WeakKeyDictionary[Optimizer, list[RemovableHandle]] = WeakKeyDictionary()


def watch_state(optimizer: Optimizer, where: str) -> None:
    """Refuse, from now on, to save or load the state that this task has: it is a part of it.

    Args:
        optimizer: The user's own.
        where: The strategy, as its user calls it.
    """

    def refuse_saving(optimizer: Optimizer) -> None:
        if not _has_none(optimizer):
            raise _part_of(optimizer, where, "state_dict()")

    def refuse_loading(optimizer: Optimizer, state: dict[str, Any]) -> None:
        if state.get("state"):
            raise _part_of(optimizer, where, "load_state_dict()")

    forget_state(optimizer)
    _watched[optimizer] = [
        optimizer.register_state_dict_pre_hook(refuse_saving),
        optimizer.register_load_state_dict_pre_hook(refuse_loading),
    ]


def forget_state(optimizer: Optimizer) -> None:
    """Refuse neither any more.

    Args:
        optimizer: Any.
    """
    for hook in _watched.pop(optimizer, ()):
        hook.remove()


def _part_of(optimizer: Optimizer, where: str, call: str) -> UserError:
    return UserError(
        f"{call} of an {type(optimizer).__name__} under {where}: each task has a part of its state",
        "strategy.state_dict() has all of it, and strategy.load_state_dict(state) takes that after "
        "prepare; all tasks call both. Learning rates are in optimizer.param_groups.",
    )


def refuse(optimizer: Optimizer, given: Any) -> bool:
    """What is asked before the steps of such an optimizer; see `optimizer_step.Asked`.

    Raises:
        UserError: Its state has begun, here or elsewhere.
    """
    return _refuse(optimizer, "was divided among tasks by", "this task has a part of it")


def refuse_of_group(optimizer: Optimizer, given: Any) -> bool:
    """As `refuse`, where each of several groups had an optimizer of its own."""
    return _refuse(optimizer, "was each group's own under", "other groups have another one")


def refuse_of_servers(optimizer: Optimizer, given: Any) -> bool:
    """As `refuse`, where servers made its steps."""
    return _refuse(optimizer, "was on servers under", "this task has nothing of it")


def _refuse(optimizer: Optimizer, where: str, here: str) -> bool:
    if _has_none(optimizer):
        return False
    if not optimizer.state and not getattr(optimizer, "_opt_called", False):
        ask_nobody(optimizer)  # it begins here, with all of it
        forget_state(optimizer)
        return False
    raise UserError(
        f"an {type(optimizer).__name__} whose state {where} a strategy that is closed: {here}",
        f"Make a new optimizer. To keep the state, save before close(), and load that: {LOADING}.",
    )


def check_state(optimizer: object) -> None:
    """Refuse an optimizer of whose state a closed strategy has left this task a part.

    Args:
        optimizer: An optimizer, or what makes one.

    Raises:
        UserError: It is such an optimizer.
    """
    if isinstance(optimizer, Optimizer) and (asked := asked_before(optimizer)) in _REFUSALS:
        asked(optimizer, ())


_REFUSALS = (refuse, refuse_of_group, refuse_of_servers)


def _has_none(optimizer: Optimizer) -> bool:
    """Whether it never has any state, so that no task lacks a part of that."""
    return type(optimizer) is SGD and not any(g["momentum"] for g in optimizer.param_groups)
