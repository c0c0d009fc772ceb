"""A call of a function as bytes for another process; what cannot be sent is named."""

from __future__ import annotations

import functools
import inspect
import linecache
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from spartito.errors import UserError

DEEPEST = 6
"""So deep it is looked for what cannot be sent."""


def packed(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The call ``function(*args, **kwargs)``, and what a process needs to make it as we would.

    Raises `UserError` with the part that cannot be sent.
    """
    if not callable(function):
        raise UserError(
            f"{function!r} cannot be called", "Give the function itself: sp.launch(train)."
        )
    name = name_of(function)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UserError(
            f"{name} is a coroutine or a generator: a call of it does nothing yet",
            "Give a function that does the work and returns: asyncio.run(...) or list(...) in it.",
        )
    try:
        call = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:
        parts = {**{f"argument {i}": arg for i, arg in enumerate(args)}, **kwargs}
        path, part = culprit({name: function, **parts})
        raise UserError(
            f"{path} cannot be sent to another process: {_kind(part)} ({_first_line(error)})",
            f"Make it inside of {name}, where each task makes its own.",
        ) from error
    return pickle.dumps({"path": sys.path, "argv": sys.argv, "cells": _cells(), "call": call})


def unpacked(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What `packed` packed, in a process that now looks for modules where the other did."""
    said = pickle.loads(data)
    sys.path[:] = [*said["path"], *(one for one in sys.path if one not in said["path"])]
    sys.argv[:] = said["argv"]
    for file, lines in said["cells"].items():  # for tracebacks, and for torch.compile
        linecache.cache[file] = len("".join(lines)), None, lines, file
    function, args, kwargs = pickle.loads(said["call"])
    own = getattr(function, "__globals__", {})
    if own.get("__name__") == "__main__":  # so that torch.save finds the classes of a notebook
        sys.modules["__main__"].__dict__.update(own)
    return function, args, kwargs


def culprit(parts: Mapping[str, Any], deepest: int = DEEPEST) -> tuple[str, Any]:
    """The innermost of ``parts`` that cannot be sent, and where it is, as ``'train', 'lock'``."""
    for name, part in parts.items():
        if _sends(part):
            continue
        inner = dict(_parts(part)) if deepest else {}
        if all(map(_sends, inner.values())):
            return f"'{name}'", part
        where, found = culprit(inner, deepest - 1)
        return f"{where} of '{name}'" if deepest < DEEPEST else f"{where} in '{name}'", found
    return "what is called", parts


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called."""
    function = getattr(function, "func", function)  # functools.partial
    return str(getattr(function, "__name__", type(function).__name__))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What is sent along with ``value``."""
    if isinstance(value, functools.partial):
        yield name_of(value), value.func
        yield from _parts(value.args)
        yield from value.keywords.items()
    elif inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        yield from (*used.nonlocals.items(), *used.globals.items())
        yield from _parts(value.__defaults__ or ())
    elif inspect.ismethod(value):
        yield type(value.__self__).__name__, value.__self__
    elif isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"item {index}", part) for index, part in enumerate(value))
    else:
        yield from getattr(value, "__dict__", {}).items()


def _sends(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _kind(value: Any) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _cells() -> dict[str, list[str]]:
    """The source of what was typed here, as cells of a notebook, which no file has."""
    return {
        file: entry[2]
        for file, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not Path(file).exists()
    }
