"""Copies of parts of a sharded tensor, where plain torch has views of the tensor."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from spartito.errors import UserError


class Source(Protocol):
    """The sharded tensor that a part was taken of."""

    local: Tensor
    is_spoilt: bool


class Copy(Tensor):
    """What plain torch has as a view of a sharded tensor, and what had to be gathered here.

    Once it is changed in place, the other would be wrong, and is refused.
    """

    source: Source
    version: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        copies: list[tuple[Copy, Tensor]] = []
        with torch._C.DisableTorchFunctionSubclass():
            given, named = _without_copies((args, kwargs or {}), copies)
        for copy, _ in copies:
            if copy.version != copy.source.local._version:
                raise spoilt()
        before = [tensor._version for _, tensor in copies]
        found = func(*given, **named)
        for (copy, tensor), version in zip(copies, before, strict=True):
            if tensor._version != version:
                copy.source.is_spoilt = True
            if found is tensor:
                return copy
        return as_copies(found, copies[0][0].source, copies[0][1])


def _without_copies(value: Any, copies: list[tuple[Copy, Tensor]]) -> Any:
    """``value`` with plain tensors, which have the history that each copy has."""
    if type(value) is Copy:
        copies.append((value, value.as_subclass(Tensor)))
        return copies[-1][1]
    if type(value) in (list, tuple):
        return type(value)(_without_copies(each, copies) for each in value)
    if type(value) is dict:
        return {key: _without_copies(each, copies) for key, each in value.items()}
    return value


def as_copies(found: Any, source: Source, of: Tensor | None = None) -> Any:
    """The results of a function of which plain torch returns views, where they are none.

    Args:
        found: What it returned.
        source: What it took.
        of: A copy that it took: its views are copies too.
    """
    if type(found) in (list, tuple):
        return type(found)(as_copies(each, source, of) for each in found)
    if type(found) is not Tensor or source.local.is_meta:
        return found
    start = found.untyped_storage().data_ptr()
    if of is not None and start != of.untyped_storage().data_ptr():
        return found
    if start == source.local.untyped_storage().data_ptr():
        return found
    copy: Copy = found.as_subclass(Copy)
    copy.source, copy.version = source, source.local._version
    return copy


def spoilt() -> UserError:
    """The error of who changes what a view would be in place."""
    return UserError(
        "a part of a sharded tensor was changed in place, or the tensor while a part was in use; "
        "where torch has a view, this task has a copy",
        "Change it by an index, x[:, :4] = x[:, :4] * 2, or do not change it in place.",
    )
