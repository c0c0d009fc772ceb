"""Other shapes of the same elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spartito.mesh.operand_plan import order, run
from spartito.mesh.rules.whole import compute_whole
from spartito.mesh.sharded_tensor import Sharded, local_of, made, rule
from spartito.mesh.spec import Spec, spec


def shape_of(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """A shape that was given as one argument or as several."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], Sequence) else given


@cache
def reshaped(
    before: Spec,
    shape: tuple[int, ...],
    target: tuple[int, ...],
    sizes: tuple[tuple[str, int], ...],
) -> tuple[Spec, Spec, tuple[int, ...]]:
    """How a tensor of ``shape`` is cut when it becomes one of ``target``, without -1.

    Returns how it has to be cut before, how it is cut after, and the shape of the shard after.
    """
    parts = dict(sizes)
    dims: list[str | None] = [None] * len(target)
    blocks: list[tuple[int, ...]] = [()] * len(target)
    kept = before
    for mine, theirs in _groups(shape, target):
        cut = [dim for dim in mine if before.dims[dim] is not None]
        large = [dim for dim in mine if shape[dim] != 1]
        goals = [dim for dim in theirs if target[dim] != 1]
        for dim in cut:
            axis, block = before.dims[dim], before.blocks_of(dim)
            goal = goals[0] if goals and dim == large[0] else None
            whole = goal is not None and len(large) == len(goals) == 1
            if block and goal is not None and not whole:
                # (3 * heads * size) as (3, heads, size): the blocks become a dim of their own
                even = len(set(block)) == 1 and len(large) == 1
                goal = goals[1] if even and target[goal] == len(block) and len(goals) > 1 else None
            if goal is not None and axis and target[goal] % parts[axis] == 0:
                dims[goal] = axis
                blocks[goal] = block if whole else ()
            else:
                kept = kept.replace(dim, None)
    after = spec(tuple(dims), (), tuple(blocks))
    return kept, after, after.local_shape(target, parts)


def _groups(shape: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Neighbouring dims of both shapes that have as many elements."""
    found, i, j = [], 0, 0
    while i < len(shape) or j < len(target):
        mine, theirs, a, b = [], [], 1, 1
        if i < len(shape):
            mine, a, i = [i], shape[i], i + 1
        if j < len(target):
            theirs, b, j = [j], target[j], j + 1
        while a != b:
            if (a < b and i < len(shape)) or j == len(target):
                a, i = a * shape[i], i + 1
                mine.append(i - 1)
            else:
                b, j = b * target[j], j + 1
                theirs.append(j - 1)
        found.append((mine, theirs))
    return found


def _resolved(shape: torch.Size, target: tuple[int, ...]) -> tuple[int, ...]:
    """``target`` without -1."""
    if -1 not in target:
        return target
    known = math.prod(size for size in target if size != -1)
    if not known or math.prod(shape) % known:
        torch.empty(shape, device="meta").view(target)  # raises as torch does
    return tuple(math.prod(shape) // known if size == -1 else size for size in target)


def view_as_shape(func: Any, x: Sharded, target: tuple[int, ...]) -> Tensor:
    """``x`` with another shape."""
    target = _resolved(x.shape, tuple(map(int, target)))
    if math.prod(target) != math.prod(x.shape):
        torch.empty(x.shape, device="meta").view(target)
    if not math.prod(target):
        return compute_whole(func, (x, target), {})  # type: ignore[no-any-return]
    sizes = tuple((axis, x.axes[axis].size) for axis in x.spec.axes)
    kept, after, shape = reshaped(x.spec, tuple(x.shape), target, sizes)
    local = local_of(x, kept, x.axes)
    local = local.view(shape) if func is Tensor.view else local.reshape(shape)
    return made(local, after, x.axes) if any(after.dims) else local


@rule(Tensor.view, Tensor.reshape, torch.reshape)
def _view(func: Any, x: Sharded, *given: Any, **named: Any) -> Any:
    if isinstance(x, Sharded) and not named and not isinstance(given[0], torch.dtype):
        return view_as_shape(func, x, shape_of(given))
    if isinstance(x, Sharded) and set(named) <= {"shape", "size"}:
        return view_as_shape(func, x, tuple(*named.values()))
    return compute_whole(func, (x, *given), named)


@rule(Tensor.view_as, Tensor.reshape_as)
def _view_as(func: Any, x: Tensor, other: Tensor) -> Any:
    plain = Tensor.view if func is Tensor.view_as else Tensor.reshape
    return plain(x, tuple(other.shape))


@rule(torch.flatten, Tensor.flatten)
def _flatten(func: Any, x: Sharded, start_dim: int = 0, end_dim: int = -1) -> Any:
    shape = list(x.shape)
    start, end = start_dim % len(shape), end_dim % len(shape)
    shape[start : end + 1] = [math.prod(shape[start : end + 1])]
    return view_as_shape(Tensor.reshape, x, tuple(shape))


@rule(torch.unflatten, Tensor.unflatten)
def _unflatten(func: Any, x: Sharded, dim: int, sizes: Sequence[int]) -> Any:
    dim %= len(x.shape)
    inner = _resolved(torch.Size([x.shape[dim]]), tuple(sizes))
    return view_as_shape(Tensor.reshape, x, (*x.shape[:dim], *inner, *x.shape[dim + 1 :]))


@rule(torch.squeeze, Tensor.squeeze)
def _squeeze(func: Any, x: Sharded, dim: Any = None) -> Any:
    dims = range(len(x.shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {each % len(x.shape) for each in dims}
    shape = [size for n, size in enumerate(x.shape) if n not in gone or size != 1]
    return view_as_shape(Tensor.reshape, x, tuple(shape))


@rule(torch.unsqueeze, Tensor.unsqueeze)
def _unsqueeze(func: Any, x: Sharded, dim: int) -> Any:
    letters = order(len(x.shape))
    at = dim % (len(letters) + 1)
    return run(lambda t: t.unsqueeze(at), [x], [letters], f"{letters[:at]}A{letters[at:]}")


def _permuted(x: Sharded, dims: Sequence[int]) -> Tensor:
    letters = order(len(x.shape))
    out = "".join(letters[dim] for dim in dims)
    return run(lambda t: t.permute(tuple(dims)), [x], [letters], out)


@rule(torch.permute, Tensor.permute)
def _permute(func: Any, x: Sharded, *dims: Any, **named: Any) -> Any:
    return _permuted(x, shape_of(tuple(*named.values()) if named else dims))


@rule(torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes, torch.swapdims)
def _transpose(func: Any, x: Sharded, dim0: int, dim1: int) -> Any:
    dims = list(range(len(x.shape)))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permuted(x, dims)


@rule(torch.movedim, Tensor.movedim)
def _movedim(func: Any, x: Sharded, source: Any, destination: Any) -> Any:
    marks = torch.empty(tuple(range(len(x.shape))), device="meta")
    return _permuted(x, func(marks, source, destination).shape)


@rule(torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
def _t(func: Any, x: Sharded) -> Any:
    dims = list(range(len(x.shape)))
    if func == Tensor.mT.__get__:  # type: ignore[attr-defined]
        dims[-1], dims[-2] = dims[-2], dims[-1]
    else:
        dims.reverse()
    return _permuted(x, dims)


@rule(Tensor.expand, Tensor.expand_as)
def _expand(func: Any, x: Tensor, *sizes: Any) -> Any:
    target = tuple(sizes[0].shape) if func is Tensor.expand_as else shape_of(sizes)
    if not isinstance(x, Sharded):
        return x.expand(target)
    new = len(target) - len(x.shape)
    cut = (None,) * new + x.spec.dims
    local = [
        -1 if axis else size for size, axis in zip(target, cut, strict=True)
    ]  # fmt: skip
    blocks = ((),) * new + x.spec.blocks if x.spec.blocks else ()
    return made(x.local.expand(local), spec(cut, (), blocks), x.axes)
