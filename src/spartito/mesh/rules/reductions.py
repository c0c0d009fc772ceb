"""Sums, means and all that works along some dims of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spartito.mesh.operand_plan import order, run
from spartito.mesh.rules.whole import compute_whole
from spartito.mesh.sharded_tensor import Sharded, like, made, rule, uncut, whole
from spartito.mesh.spec import spec

Dims = int | Sequence[int] | None


def all_of(x: Tensor, dim: Dims) -> tuple[int, ...]:
    """The dims that are meant, none negative; None and () are all."""
    count = x.dim()
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(count))
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    for each in given:
        if not -count <= each < count:
            raise IndexError(f"dim {each} of a tensor with {count} dims")
    return tuple(each % count for each in given)


@rule(torch.sum, Tensor.sum, torch.mean, Tensor.mean, torch.nansum, Tensor.nansum)
def _sum(
    func: Any,
    x: Sharded,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    **named: Any,
) -> Any:
    dim = named.get("axis", dim)
    keepdim = named.get("keepdims", keepdim)
    is_mean = func in (torch.mean, Tensor.mean)
    if is_mean and not (dtype or x.dtype).is_floating_point:
        return func(x.local, dim, keepdim, dtype=dtype)  # raises as torch does
    gone = all_of(x, dim)
    names = order(x.dim())
    ones = [" " if n in gone else name for n, name in enumerate(names)]
    out = "".join(name for name in ones if keepdim or name != " ")
    plain = torch.nansum if func in (torch.nansum, Tensor.nansum) else torch.sum
    total = run(lambda t: plain(t, gone, keepdim, dtype=dtype), [x], [names], out)
    return total / math.prod(x.shape[n] for n in gone) if is_mean else total


def _rewrap(found: Any, x: Sharded) -> Any:
    """The results of an operation that leaves all dims as they are."""
    if isinstance(found, Tensor):
        return like(found, x)
    return type(found)([_rewrap(each, x) for each in found])


def along(func: Any, x: Tensor, dims: Sequence[int], *args: Any, **named: Any) -> Any:
    """An operation that leaves the shape, and works along some dims, which are gathered."""
    x = uncut(x, *dims)
    if not isinstance(x, Sharded):
        return func(x, *args, **named)
    return _rewrap(func(x.local, *args, **named), x)


@rule(torch.softmax, Tensor.softmax, F.softmax, F.log_softmax, torch.log_softmax,
      Tensor.log_softmax, F.softmin, torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod,
      torch.sort, Tensor.sort, torch.argsort, Tensor.argsort, torch.cummax, torch.cummin,
      torch.logcumsumexp)  # fmt: skip
def _along_dim(func: Any, x: Tensor, dim: int | None = None, *args: Any, **named: Any) -> Any:
    if not isinstance(dim, int):
        given = (x, *args) if dim is None else (x, dim, *args)
        return compute_whole(func, given, named)
    return along(func, x, [dim], dim, *args, **named)


@rule(F.normalize)
def _normalize(
    func: Any, x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> Any:
    return along(func, x, all_of(x, dim), p, dim, eps)


@rule(torch.flip, Tensor.flip)
def _flip(func: Any, x: Tensor, *dims: Any, **named: Any) -> Any:
    chosen = named.get("dims", dims[0] if len(dims) == 1 else dims)
    return along(func, x, all_of(x, chosen), all_of(x, chosen))


@rule(torch.roll, Tensor.roll)
def _shifted(func: Any, x: Tensor, shifts: Any, dims: Any = ()) -> Any:
    return along(func, x, all_of(x, dims), shifts, dims)


@rule(torch.tril, Tensor.tril, torch.triu, Tensor.triu)
def _triangle(func: Any, x: Tensor, diagonal: int = 0) -> Any:
    return along(func, x, [-2, -1], diagonal)


@rule(torch.topk, Tensor.topk, torch.kthvalue, Tensor.kthvalue)
def _topk(func: Any, x: Tensor, k: int, dim: int = -1, *args: Any, **named: Any) -> Any:
    if func in (torch.topk, Tensor.topk):
        return along(func, x, [dim], k, dim, *args, **named)
    return compute_whole(func, (x, k, dim, *args), named)


@rule(torch.max, Tensor.max, torch.min, Tensor.min, torch.amax, Tensor.amax, torch.amin,
      Tensor.amin, torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin, torch.logsumexp,
      Tensor.logsumexp, torch.prod, Tensor.prod, torch.any, Tensor.any, torch.all, Tensor.all,
      torch.median, Tensor.median, torch.var, Tensor.var, torch.std, Tensor.std, torch.var_mean,
      torch.std_mean, torch.count_nonzero, Tensor.count_nonzero)  # fmt: skip
def _reduce(func: Any, x: Tensor, *args: Any, **named: Any) -> Any:
    if args and isinstance(args[0], Tensor):  # the larger of two: for each element
        return _LARGER[func](x, *args, **named)
    dim = named.get("dim", named.get("axis", args[0] if args else None))
    if isinstance(dim, bool):  # var(x, unbiased)
        dim = None
    if dim is None:
        return func(whole(x), *args, **named)
    gone = all_of(x, dim)
    x = uncut(x, *gone)
    if not isinstance(x, Sharded):
        return func(x, *args, **named)
    found = func(x.local, *args, **named)
    return _reduced(found, x, gone)


_LARGER = {
    torch.max: torch.maximum, Tensor.max: torch.maximum,
    torch.min: torch.minimum, Tensor.min: torch.minimum,
}  # fmt: skip


def _reduced(found: Any, x: Sharded, gone: tuple[int, ...]) -> Any:
    if not isinstance(found, Tensor):
        return type(found)([_reduced(each, x, gone) for each in found])
    if found.dim() == x.dim():
        return like(found, x)
    kept = [n for n in range(x.dim()) if n not in gone]
    blocks = tuple(x.spec.blocks_of(n) for n in kept)
    return made(found, spec(tuple(x.spec.dims[n] for n in kept), (), blocks), x.axes)
