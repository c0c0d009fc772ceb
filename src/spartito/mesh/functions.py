"""What an autograd Function of the user takes: torch asks nobody when one is applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_map

from spartito.mesh.sharded_tensor import Sharded, all_whole

_plain: Any = vars(Function)["apply"]
_changes: list[Callable[[Any], Any]] = []


@contextmanager
def taking(change: Callable[[Any], Any]) -> Iterator[None]:
    """A block in which Functions take what ``change`` makes of each thing that they are given."""
    watch()
    _changes.append(change)
    try:
        yield
    finally:
        _changes.pop()


@cache
def watch() -> None:
    """From now on Functions take whole tensors where they would get a task's shard of them."""
    Function.apply = classmethod(_apply)  # type: ignore[method-assign, assignment]


def _apply(kind: Any, *args: Any, **named: Any) -> Any:
    home = kind.__module__
    if _changes and not home.startswith("spartito."):
        args = tuple(_changes[-1](arg) if isinstance(arg, Tensor) else arg for arg in args)
    elif not any(type(arg) is Sharded for arg in args):
        return _plain.__func__(kind, *args, **named)
    if home.startswith("torch."):  # of hooks and checkpoints, which know their results
        return _plain.__func__(kind, *args, **named)
    made = _plain.__func__(kind, *all_whole(args), **named)
    return tree_map(_seen, made) if _changes else made


def _seen(made: Any) -> Any:
    """The same by an operation of torch: where a Function returns what it took, there is none."""
    return made.view_as(made) if isinstance(made, Tensor) else made
