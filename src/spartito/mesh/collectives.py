"""Differentiable collectives along one axis of the mesh.

All of them keep one rule: a replicated tensor has its full gradient, with the same bits on every
task of the axis; a shard has the gradient of the shard; a partial sum has a replicated gradient.

| | forward | backward |
|---|---|---|
| `gather` | all shards | own slice |
| `cut` | own slice | all shards |
| `enter` | nothing: a replicated operand of a sharded computation | sum |
| `reduce` | sum of the parts | nothing |
| `gather_enter` | all shards, for a sharded computation | sum, own slice |
| `reduce_cut` | sum, own slice | all shards |
| `swap` | cut along another dim | back |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spartito.collectives.collective import Collective
from spartito.collectives.memory.shared_memory import SharedMemoryCollective
from spartito.collectives.rows import is_channels_last
from spartito.mesh.exchange import Exchange
from spartito.mesh.spec import Blocks

SMALL = 64 << 10
"""Bytes of a leaf's gradient that waits for the end of a backward pass."""


class _Plain:
    """What `Exchange` does, for tasks that share no memory."""

    def __init__(self, group: Collective) -> None:
        self._group, self.size, self.index = group, group.world_size, group.rank

    def sum(self, tensor: Tensor) -> Tensor:
        return self._group.all_reduce(tensor.clone(memory_format=torch.contiguous_format))

    def all(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._group.all_gather(tensor.contiguous()), dim)

    def sum_own(self, tensor: Tensor, dim: int) -> Tensor:
        parts = torch.stack(tensor.chunk(self.size, dim))
        own = self._group.reduce_scatter(parts.view(self.size, -1))
        return own.view(parts.shape[1:])


class _Nobody:
    """What `Exchange` does, of tensors without data: nobody is asked."""

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def all(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat([tensor] * self.size, dim)

    def sum_own(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(self.size, dim)[self.index].clone()


class Axis:
    """One axis as a task sees it: who is along it, and plain collectives between them.

    Args:
        name: Of the axis.
        group: The tasks along it; their ranks follow the axis.
        rows_from: Bytes from which the sum of a product stays cut by rows, in shared memory.
    """

    rows_from: float = math.inf

    def __init__(self, name: str, group: Collective, rows_from: float = math.inf) -> None:
        self.name, self._asked_rows = name, rows_from
        self.join(group)

    def join(self, group: Collective) -> None:
        """Be along it with these from now on: the tasks have met again.

        Args:
            group: The tasks along it.
        """
        self.group = group
        self.size, self.index = group.world_size, group.rank
        shares = isinstance(group, SharedMemoryCollective)
        # Other groups have no reduce-scatter.
        self.rows_from = self._asked_rows if shares else math.inf
        self._by: Exchange | _Plain = Exchange(group) if shares else _Plain(group)  # type: ignore[arg-type]
        self._nobody = _Nobody(self.size, self.index)

    def _of(self, tensor: Tensor) -> Exchange | _Plain | _Nobody:
        return self._nobody if tensor.is_meta else self._by

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the axis, in a tensor of its own; the same bits on all tasks."""
        with torch.no_grad():
            if self.size == 1:
                return tensor.clone()
            if is_channels_last(tensor):
                return self._of(tensor).sum(tensor.movedim(1, -1)).movedim(-1, 1)
            return self._of(tensor).sum(tensor)

    def most(self, tensor: Tensor) -> Tensor:
        """The largest of the tasks' elements, each for itself."""
        with torch.no_grad():
            return self._of(tensor).all(tensor.unsqueeze(0), 0).amax(0)

    def all(self, tensor: Tensor, dim: int, blocks: Blocks = ()) -> Tensor:
        """The shards of all tasks, joined along ``dim``."""
        with torch.no_grad():
            if self.size == 1:
                return tensor.clone()
            if is_channels_last(tensor):
                last = self._of(tensor).all(tensor.movedim(1, -1), _moved(dim, tensor.dim()))
                joined = last.movedim(-1, 1)
            else:
                joined = self._of(tensor).all(tensor, dim)
            if not blocks:
                return joined
            parts = [
                part.split([size // self.size for size in blocks], dim)
                for part in joined.chunk(self.size, dim)
            ]
            return torch.cat([part for block in zip(*parts, strict=True) for part in block], dim)

    def view(self, tensor: Tensor, dim: int, blocks: Blocks = ()) -> Tensor:
        """This task's shard of a tensor that all have, where it lies if it can."""
        if blocks:
            parts = [self.view(block, dim) for block in tensor.split(list(blocks), dim)]
            return torch.cat(parts, dim)
        size = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.index * size, size)

    def own(self, tensor: Tensor, dim: int, blocks: Blocks = ()) -> Tensor:
        """As `view`, in memory of its own."""
        return self.view(tensor, dim, blocks).clone(memory_format=torch.contiguous_format)

    def sum_own(self, tensor: Tensor, dim: int, blocks: Blocks = ()) -> Tensor:
        """This task's shard of the sum over the axis."""
        with torch.no_grad():
            if self.size == 1 or blocks:
                return self.view(self.sum(tensor), dim, blocks)
            if is_channels_last(tensor):
                own = self._of(tensor).sum_own(tensor.movedim(1, -1), _moved(dim, tensor.dim()))
                return own.movedim(-1, 1)
            return self._of(tensor).sum_own(tensor, dim)


def _moved(dim: int, dims: int) -> int:
    """Where a dim is once the channels are last."""
    dim %= dims
    return dims - 1 if dim == 1 else dim - (dim > 1)


class _Along(torch.autograd.Function):
    """A collective along a dim, and the one that its gradient takes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, do: Any, back: Any, axis: Axis, dim: int, blocks: Blocks
    ) -> Tensor:
        ctx.back, ctx.where = back, (axis, dim, blocks)
        return do(x, dim, blocks)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _forget()
        return ctx.back(grad, *ctx.where), None, None, None, None, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        _forget()
        return reduce(grad, ctx.axis), None


class _EnterLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.leaf = axis, x
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        _forget()
        leaf = ctx.leaf
        hooks = leaf._backward_hooks or leaf._post_accumulate_grad_hooks
        if _later is None or hooks or grad.nbytes > SMALL or grad.requires_grad:
            return reduce(grad, ctx.axis), None
        _later.append((leaf, ctx.axis, grad))
        return None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _forget()
        return enter(grad, ctx.axis), None


def gather(x: Tensor, axis: Axis, dim: int, blocks: Blocks = ()) -> Tensor:
    """All shards joined along ``dim``, as a replicated tensor."""
    return _along(axis.all, cut, x, axis, dim, blocks)


def gather_enter(x: Tensor, axis: Axis, dim: int, blocks: Blocks = ()) -> Tensor:
    """As `gather` and `enter` of the result, with one collective in backward."""
    return _along(axis.all, reduce_cut, x, axis, dim, blocks)


def cut(x: Tensor, axis: Axis, dim: int, blocks: Blocks = ()) -> Tensor:
    """This task's shard of a replicated tensor."""
    return _along(axis.own if _has_gradient(x) else axis.view, gather, x, axis, dim, blocks)


def reduce_cut(x: Tensor, axis: Axis, dim: int, blocks: Blocks = ()) -> Tensor:
    """This task's shard of a sum of parts."""
    return _along(axis.sum_own, gather_enter, x, axis, dim, blocks)


def _along(do: Any, back: Any, x: Tensor, axis: Axis, dim: int, blocks: Blocks) -> Tensor:
    """What the collective ``do`` makes of ``x``; its gradient takes ``back``."""
    if _has_gradient(x):
        return _Along.apply(x, do, back, axis, dim, blocks)  # type: ignore[no-any-return, no-untyped-call]
    return do(x, dim, blocks)  # type: ignore[no-any-return]


def enter(x: Tensor, axis: Axis) -> Tensor:
    """A replicated tensor as an operand of a computation of which each task does a part."""
    if _has_gradient(x):
        kind = _EnterLeaf if x.is_leaf else _Enter
        return kind.apply(x, axis)  # type: ignore[no-any-return, no-untyped-call]
    return x


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of the parts that the tasks have, as a replicated tensor."""
    if _has_gradient(x):
        return _Reduce.apply(x, axis)  # type: ignore[no-any-return, no-untyped-call]
    return axis.sum(x)


_later: list[tuple[Tensor, Axis, Tensor]] | None = None


@contextmanager
def summing_at_end() -> Iterator[None]:
    """A backward pass at whose end the gradients of small replicated leaves are summed, at once.

    Those of norms and biases behind a cut by rows: each by itself would be a crossing.
    """
    global _later
    before, _later = _later, []
    try:
        yield
        _settle(_later)
    finally:
        _later = before


def _settle(waiting: list[tuple[Tensor, Axis, Tensor]]) -> None:
    """Add to each leaf the sum over the axis of what its uses on this task found."""
    groups: dict[tuple[Axis, torch.dtype], dict[int, tuple[Tensor, Tensor]]] = {}
    for leaf, axis, grad in waiting:
        group = groups.setdefault((axis, grad.dtype), {})
        known = group.get(id(leaf))
        group[id(leaf)] = leaf, grad if known is None else known[1] + grad
    for (axis, _), group in groups.items():
        flat = axis.sum(torch.cat([grad.reshape(-1) for _, grad in group.values()]))
        sums = flat.split([grad.numel() for _, grad in group.values()])
        for (leaf, _), part in zip(group.values(), sums, strict=True):
            found = part.view(leaf.shape)
            leaf.grad = found if leaf.grad is None else leaf.grad.add_(found)


_last: list[tuple[Any, ...]] = []


def once(do: Callable[..., Tensor], x: Tensor, axis: Axis, where: tuple[Any, ...]) -> Tensor:
    """``do(x, axis, *where)``; where the operation before did the same, its result.

    Query, key and value are made of one tensor: it crosses once, and so does its gradient.
    """
    learns = torch.is_grad_enabled()
    if type(x) is not Tensor or (learns and x.is_leaf) or x.is_inference():
        return do(x, axis, *where)
    key = do, axis, where, x._version, learns
    if _last and _last[0][0] is x and _last[0][1] == key:
        return _last[0][2]  # type: ignore[no-any-return]
    found = do(x, axis, *where)
    _last[:] = [(x, key, found)]
    return found


def _forget() -> None:
    """Backward begins: what was kept would hold memory."""
    _last.clear()


def _has_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()
