"""Callbacks made of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any

from spartito.errors import UserError
from spartito.names import nearest, plural
from spartito.training.callback import Callback

HOOKS: Mapping[str, int] = {
    name: len(signature(method).parameters) - 1
    for name, method in vars(Callback).items()
    if name.startswith("on_")
}
"""The hooks of a `Callback`, and how many arguments they get."""


class LambdaCallback(Callback):
    """Calls a function at each hook that is given one, as in Keras.

        sp.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"]))

    Functions get what the hook gets. Where Keras has a last ``logs`` and `Callback` has none
    (``on_epoch_begin``, ``on_train_begin``, ...), a function may take it: it is empty.

    Args:
        functions: By the name of the hook: any of those of `Callback`.

    Raises:
        UserError: There is no such hook, or the function does not take its arguments.
    """

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            if name not in HOOKS:
                raise UserError(f"LambdaCallback has no hook {name!r}", nearest(name, HOOKS))
            setattr(self, name, _fitted(name, function))


def _fitted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as the hook ``name`` calls it."""
    count = HOOKS[name]
    if _takes(function, count):
        return function
    if not _takes(function, count + 1):
        raise UserError(
            f"{name}={function!r} does not take {plural(count, 'argument')}",
            f"Callback.{name} has the arguments: {', '.join(_arguments(name)) or 'none'}.",
        )

    @wraps(function)
    def with_logs(*args: Any) -> None:
        function(*args, {})

    return with_logs


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # of a builtin nobody knows
        return True
    return True


def _arguments(name: str) -> list[str]:
    found = signature(getattr(Callback, name)).parameters.values()
    return [p.name for p in found if p.name != "self" and p.kind is Parameter.POSITIONAL_OR_KEYWORD]
