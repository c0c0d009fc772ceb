"""Tensors joined, taken apart and indexed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from spartito.mesh.operand_plan import moved, order, plan, run, spec_of
from spartito.mesh.rules.elementwise import broadcast
from spartito.mesh.rules.whole import compute_whole
from spartito.mesh.sharded_tensor import Sharded, like, made, rule, uncut


@rule(torch.cat, torch.concat, torch.concatenate)
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0, **named: Any) -> Any:
    dim = named.get("axis", dim)
    dims = max(t.dim() for t in tensors)
    tensors = [t for t in tensors if t.dim() == dims or t.shape != (0,)]  # torch leaves those out
    dim %= dims
    axis = {t.spec.dims[dim] if isinstance(t, Sharded) else None for t in tensors}
    names = order(tensors[0].dim())
    if len(axis) == 1 and None not in axis:  # each is cut there: together they are blocks
        first = next(t for t in tensors if isinstance(t, Sharded))
        others = [uncut(t, *(n for n in range(t.dim()) if n != dim)) for t in tensors]
        alike = all(t.spec.dims == first.spec.dims for t in tensors if isinstance(t, Sharded))
        given = [t for t in (tensors if alike else others) if isinstance(t, Sharded)]
        blocks = tuple(size for t in given for size in t.spec.blocks_of(dim) or (t.shape[dim],))
        to = given[0].spec.replace(dim, given[0].spec.dims[dim], blocks)
        return made(torch.cat([t.local for t in given], dim), to, first.axes)
    each = [names] * len(tensors)
    return run(lambda *parts: torch.cat(parts, dim), tensors, each, names, names[dim])


@rule(torch.stack)
def _stack(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    names = order(tensors[0].dim())
    at = dim % (len(names) + 1)
    out = f"{names[:at]}A{names[at:]}"
    return run(lambda *parts: torch.stack(parts, at), tensors, [names] * len(tensors), out)


def _parts(x: Sharded, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """``x`` taken apart along ``dim``, where its blocks begin or where it is whole."""
    axis = x.spec.dims[dim]
    if axis is not None:
        blocks = x.spec.blocks_of(dim)
        ends = list(accumulate(blocks))
        if set(accumulate(sizes)) <= set(ends):
            size = x.axes[axis].size
            parts = x.local.split([each // size for each in sizes], dim)
            found, start = [], 0
            for part, length in zip(parts, sizes, strict=True):
                inside = [
                    b for b, end in zip(blocks, ends, strict=True) if start < end <= start + length
                ]
                to = x.spec.replace(dim, axis, tuple(inside) if len(inside) > 1 else ())
                found.append(made(part, to, x.axes))
                start += length
            return tuple(found)
        return tuple(_split(torch.split, uncut(x, dim), sizes, dim))
    return tuple(like(part, x) for part in x.local.split(list(sizes), dim))


@rule(torch.split, Tensor.split, torch.functional.split, torch.split_with_sizes)
def _split(func: Any, x: Tensor, split_size: Any, dim: int = 0, **named: Any) -> Any:
    if not isinstance(x, Sharded):
        return x.split(split_size, dim)
    dim %= x.dim()
    size = x.shape[dim]
    if isinstance(split_size, int):
        sizes = [split_size] * (size // split_size)
        sizes += [size % split_size] if size % split_size else []
    else:
        sizes = list(split_size)
        if sum(sizes) != size:
            torch.empty(size, device="meta").split(sizes)  # raises as torch does
    return _parts(x, sizes, dim)


@rule(torch.chunk, Tensor.chunk, torch.tensor_split, Tensor.tensor_split)
def _chunk(func: Any, x: Sharded, chunks: Any, dim: int = 0) -> Any:
    sizes = [len(part) for part in func(torch.empty(x.shape[dim], device="meta"), chunks)]
    return _parts(x, sizes, dim % x.dim())


@rule(torch.unbind, Tensor.unbind, Tensor.__iter__)
def _unbind(func: Any, x: Tensor, dim: int = 0) -> Any:
    found = tuple(x.select(dim, n) for n in range(x.shape[dim]))
    return iter(found) if func is Tensor.__iter__ else found


@rule(torch.select, Tensor.select)
def _select(func: Any, x: Tensor, dim: int, index: int) -> Any:
    x, dim = uncut(x, dim), dim % x.dim()
    names = order(x.dim())
    out = names[:dim] + names[dim + 1 :]
    return _of_one(lambda t: t.select(dim, index), x, names, out)


def _of_one(function: Any, x: Tensor, names: str, out: str) -> Tensor:
    return run(function, [x], [names], out) if isinstance(x, Sharded) else function(x)


@rule(torch.narrow, Tensor.narrow)
def _narrow(func: Any, x: Tensor, dim: int, start: Any, length: int) -> Any:
    index: list[Any] = [slice(None)] * x.dim()
    index[dim] = slice(int(start), int(start) + length)
    return x[tuple(index)]


@rule(torch.index_select, Tensor.index_select)
def _index_select(func: Any, x: Tensor, dim: int, index: Tensor) -> Any:
    dim %= x.dim()
    names = order(x.dim())
    out = f"{names[:dim]}A{names[dim + 1 :]}"
    letters = [names, "A" if index.dim() else ""]
    return run(lambda t, at: t.index_select(dim, at), [x, index], letters, out, f"{names[dim]}A")


@rule(torch.gather, Tensor.gather, torch.take_along_dim)
def _gather(func: Any, x: Tensor, dim: int, index: Tensor, **named: Any) -> Any:
    if func is torch.take_along_dim or x.dim() != index.dim() or named:
        return compute_whole(func, (x, dim, index), named)
    names = order(x.dim())
    uneven = "".join(n for n, a, b in zip(names, x.shape, index.shape, strict=True) if a != b)
    return run(
        lambda t, at: t.gather(dim, at), [x, index], [names, names], names, names[dim] + uneven
    )


@rule(torch.repeat_interleave, Tensor.repeat_interleave)
def _repeat_interleave(
    func: Any, x: Tensor, repeats: Any, dim: int | None = None, **named: Any
) -> Any:
    if not isinstance(repeats, int) or dim is None or named or not isinstance(x, Sharded):
        return compute_whole(func, (x, repeats, dim), named)
    if x.spec.blocks_of(dim % x.dim()):
        return uncut(x, dim).repeat_interleave(repeats, dim)
    return like(x.local.repeat_interleave(repeats, dim), x)


@rule(Tensor.repeat)
def _repeat(func: Any, x: Tensor, *sizes: Any) -> Any:
    times = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    new = len(times) - x.dim()
    x = uncut(x, *(dim for dim in range(x.dim()) if times[new + dim] != 1))
    names = order(x.dim())
    return _of_one(lambda t: t.repeat(times), x, names, "ABCDEFGH"[:new] + names)


def _indexed(x: Tensor, given: Any) -> tuple[Tensor, Any, str] | None:
    """``x`` with the dims whole that the index needs, the index for shards, the result's letters.

    None: it is one that mixes tensors.
    """
    index = given if isinstance(given, tuple) else (given,)
    index = tuple(torch.as_tensor(each) if isinstance(each, list) else each for each in index)
    tensors = [each for each in index if isinstance(each, Tensor) and each.dim()]
    if any(isinstance(each, (Sharded, bool)) for each in index) or len(tensors) > 1:
        return None
    if tensors and any(isinstance(each, int) for each in index):
        return None
    plain = [int(each) if isinstance(each, Tensor) and not each.dim() and
             each.dtype is not torch.bool else each for each in index]  # fmt: skip
    if any(isinstance(each, Tensor) and not each.dim() for each in plain):
        return None
    used = sum(_width(each) for each in plain)
    rest: list[Any] = [slice(None)] * (x.dim() - used)
    if any(each is Ellipsis for each in plain):
        spot = next(n for n, each in enumerate(plain) if each is Ellipsis)
        plain[spot : spot + 1] = rest
    else:
        plain += rest
    names, out, dim, whole = order(x.dim()), "", 0, []
    fresh = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    for each in plain:
        width = _width(each)
        if each is None:
            out += next(fresh)
        elif isinstance(each, slice):
            size = x.shape[dim]
            if each.indices(size) == (0, size, 1):
                out += names[dim]
            else:
                whole.append(dim)
                out += next(fresh)
        else:
            whole += range(dim, dim + width)
            if isinstance(each, Tensor):
                count = 1 if each.dtype is torch.bool else each.dim()
                out += "".join(next(fresh) for _ in range(count))
        dim += width
    return uncut(x, *whole), tuple(_local(each, n, plain) for n, each in enumerate(plain)), out


def _local(each: Any, number: int, plain: Sequence[Any]) -> Any:
    """An index of a whole dim as one that fits a shard too."""
    is_all = isinstance(each, slice) and each.step in (None, 1) and each.start in (None, 0)
    return slice(None) if is_all and each.stop is None else each


def _width(each: Any) -> int:
    """How many dims of the tensor an index stands for."""
    if each is None or each is Ellipsis:
        return 0
    return each.dim() if isinstance(each, Tensor) and each.dtype is torch.bool else 1


@rule(Tensor.__getitem__)
def _getitem(func: Any, x: Tensor, index: Any) -> Any:
    found = _indexed(x, index) if isinstance(x, Sharded) else None
    if found is None:
        return compute_whole(func, (x, index), {})
    value, own, out = found
    return _of_one(lambda t: t[own], value, order(x.dim()), out)


@rule(Tensor.__setitem__)
def _setitem(func: Any, x: Tensor, index: Any, value: Any) -> Any:
    if not isinstance(x, Sharded):
        return compute_whole(func, (x, index, value), {})
    x.is_spoilt = False
    found = _indexed(x, index)
    if found is None or found[0] is not x:
        return compute_whole(func, (x, index, value), {})
    _, own, out = found
    if isinstance(value, Tensor):
        goal = _of_one(lambda t: t[own], x.detach(), order(x.dim()), out)
        names = broadcast(value.shape, goal.shape, order(goal.dim()))
        shape = order(goal.dim())
        decided = plan((spec_of(goal), spec_of(value)), (shape, names), shape, "", (0, -1))
        value = moved([goal, value], decided, x.axes)[1]
    x.local[own] = value
    return None
