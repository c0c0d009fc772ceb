"""How a tensor lies on the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

Blocks = tuple[int, ...]


class Spec(NamedTuple):
    """Which mesh axis each dim of a tensor is cut along, each axis once; None: not at all.

    ``Spec(("model", None))`` is a matrix cut by rows: each task of the axis has as many, in the
    order of the axis.

    Attributes:
        dims: An axis or None for each dim of the tensor.
        partial: Axes over which the tensor is a sum that is still to be made.
        blocks: Per dim the sizes (of the whole tensor) of blocks that are each cut evenly, as
            query, key and value packed into one: ``((24, 24, 24), ())``; ``()`` for a dim that is
            cut as one, and for all of them where none has blocks.
    """

    dims: tuple[str | None, ...]
    partial: tuple[str, ...] = ()
    blocks: tuple[Blocks, ...] = ()

    @property
    def is_replicated(self) -> bool:
        """Whether every task has all of the tensor."""
        return not self.partial and not any(self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut a dim, in the order of the dims."""
        return tuple(axis for axis in self.dims if axis)

    def blocks_of(self, dim: int) -> Blocks:
        """The blocks of a dim; () if it is cut as one."""
        return self.blocks[dim] if self.blocks else ()

    def local_shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the shard of a tensor of ``shape``, with the size of each axis."""
        return tuple(
            size // sizes[axis] if axis else size
            for size, axis in zip(shape, self.dims, strict=True)
        )

    def global_shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the whole tensor from that of a shard."""
        return tuple(
            size * sizes[axis] if axis else size
            for size, axis in zip(shape, self.dims, strict=True)
        )

    def replace(self, dim: int, axis: str | None, blocks: Blocks = ()) -> Spec:
        """The same with another axis for one dim."""
        dims = (*self.dims[:dim], axis, *self.dims[dim + 1 :])
        kept = self.blocks or ((),) * len(dims)
        return spec(dims, self.partial, (*kept[:dim], blocks, *kept[dim + 1 :]))


@cache
def spec(
    dims: tuple[str | None, ...],
    partial: tuple[str, ...] = (),
    blocks: tuple[Blocks, ...] = (),
) -> Spec:
    """The `Spec` of these, one object for equal ones; blocks of uncut dims are left out."""
    kept = tuple(b if axis else () for b, axis in zip(blocks, dims, strict=True)) if blocks else ()
    return Spec(dims, tuple(sorted(partial)), kept if any(kept) else ())


def replicated(dims: int) -> Spec:
    """The spec of a tensor of so many dims that every task has whole."""
    return spec((None,) * dims)
