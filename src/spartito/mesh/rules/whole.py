"""What is not on the table: gathered, computed by every task, and said once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from spartito.errors import UserError
from spartito.mesh.part_copies import as_copies
from spartito.mesh.sharded_tensor import Sharded, at, local_of, map_tensors
from spartito.notes import warn

_said: set[tuple[str, str]] = set()


def compute_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The plain operation with whole tensors: right for every operation, and slower.

    What it changes in place is cut again into the shards.
    """
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return _property(func, *args)
    if name in ("__set__", "__delete__"):
        raise UserError(
            "an attribute of a sharded tensor was set",
            "Change its elements in place, or make a new tensor.",
        )
    changed = _changed(name, args, kwargs)
    _say(name, args, kwargs)
    copies = {id(value): value.whole().clone() for value in changed}

    wholes: list[tuple[Sharded, Tensor]] = []

    def plain(value: Sharded) -> Tensor:
        if id(value) in copies:
            return copies[id(value)]
        wholes.append((value, value.whole()))
        return wholes[-1][1]

    result = func(*map_tensors(args, plain), **map_tensors(kwargs, plain))
    for value, tensor in wholes:
        result = as_copies(result, value, tensor)
    for value in changed:
        if copies[id(value)].shape != value.shape:
            raise UserError(
                f"{name}() changes the shape of a sharded tensor in place",
                f"Make a new one: x = x.{name.rstrip('_')}(...).",
            )
        value.local.copy_(local_of(copies[id(value)], value.spec, value.axes))
        if result is copies[id(value)]:
            return value
    return result


def _changed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Sharded]:
    """The sharded operands that the operation changes."""
    in_place = name.endswith("_") and not name.endswith("__")
    in_place = in_place or (name.startswith("__i") and name != "__invert__")
    in_place = in_place or name == "__setitem__" or kwargs.get("inplace") is True
    first = args[0] if in_place and args else None
    found = [each for each in (first if isinstance(first, (list, tuple)) else [first])
             if isinstance(each, Sharded)]  # fmt: skip
    if isinstance(out := kwargs.get("out"), Sharded):
        found.append(out)
    return found


def _property(func: Any, value: Sharded) -> Any:
    """A property of a tensor: that of the shard, unless it is a tensor itself."""
    found = func(value.local)
    if not isinstance(found, Tensor):
        return found
    whole = value.whole()
    return as_copies(func(whole), value, whole)


def _say(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    key = name, at()
    if key in _said:
        return
    _said.add(key)
    cut: list[str] = []
    map_tensors(
        (args, kwargs), lambda value: cut.append(f"{tuple(value.shape)} cut as {value.spec.dims}")
    )
    counted = [f"{count} of {what}" if count > 1 else what for what, count in Counter(cut).items()]
    warn(
        "%s%s has no rule for %s: every task gathers and computes all of it",
        name, f" in {at()}" if at() else "", " and ".join(counted),
    )  # fmt: skip
