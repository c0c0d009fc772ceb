"""Which part of a whole tensor a task holds: boxes of it, and how they lie in its own memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Box(NamedTuple):
    """A range of each dimension of a tensor: where it begins, and how long it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> Box:
        """The box that is a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it lies within a tensor of ``shape``."""
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        edges = zip(self.offsets, self.sizes, shape, strict=True)
        return all(first >= 0 and size >= 0 and first + size <= all_ for first, size, all_ in edges)

    def common(self, other: Box) -> Box | None:
        """What both have; None where that is nothing."""
        edges = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        bounds = [(max(a, b), min(a + n, b + m)) for a, n, b, m in edges]
        if any(start >= stop for start, stop in bounds):
            return None
        return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where it is in a tensor that holds ``outer``."""
        edges = zip(self.offsets, self.sizes, outer.offsets, strict=True)
        return tuple(slice(first - begin, first - begin + size) for first, size, begin in edges)


class Cut(Protocol):
    """How a task holds its part of a tensor that it has not all of."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole tensor."""
        ...

    @property
    def local(self) -> tuple[int, ...]:
        """That of the tensor which this task has."""
        ...

    def parts(self, tensor: Tensor) -> list[tuple[Box, Tensor]]:
        """The boxes that the local ``tensor`` consists of, each with a view of its elements."""
        ...


@dataclass(frozen=True)
class BoxCut:
    """A task holds one box, as a tensor of the box's shape: tensor parallelism, FSDP.

    Args:
        shape: That of the whole tensor.
        offsets: Where the box begins in it.
        local: The shape of the box.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: tuple[int, ...]

    def parts(self, tensor: Tensor) -> list[tuple[Box, Tensor]]:
        """The one box."""
        return [(Box(self.offsets, self.local), tensor)]


@dataclass(frozen=True)
class SpanCut:
    """A task holds a range of a tensor's elements, as a flat tensor: ZeRO with flat buffers.

    Args:
        shape: That of the whole tensor.
        start: The first element, in the order of ``dims``.
        stop: The one after the last.
        dims: The dimensions, slowest first, in which elements are counted; None: as they are.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    dims: tuple[int, ...] | None = None

    @property
    def local(self) -> tuple[int, ...]:
        """The length of the range."""
        return (self.stop - self.start,)

    def parts(self, tensor: Tensor) -> list[tuple[Box, Tensor]]:
        """The boxes that the range consists of: at most two per dimension, less one."""
        dims = tuple(range(len(self.shape))) if self.dims is None else self.dims
        back = [dims.index(dim) for dim in range(len(dims))]
        found, done = [], 0
        for box in boxes_of_span(tuple(self.shape[dim] for dim in dims), self.start, self.stop):
            flat = tensor[done : done + box.numel]
            done += box.numel
            own = Box(tuple(box.offsets[b] for b in back), tuple(box.sizes[b] for b in back))
            found.append((own, flat.view(box.sizes).permute(back)))
        return found


@dataclass(frozen=True)
class NestedCut:
    """A task holds a part of a part: of its shard of a tensor parallel model a range of elements.

    Args:
        outer: Of the whole tensor the part that several tasks have, as views of one memory.
        inner: Of that part what this task has.
    """

    outer: Cut
    inner: Cut

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole tensor."""
        return self.outer.shape

    @property
    def local(self) -> tuple[int, ...]:
        """That of what this task has."""
        return self.inner.local

    def parts(self, tensor: Tensor) -> list[tuple[Box, Tensor]]:
        """What the boxes of the inner part are of the whole tensor."""
        found = []
        placed = self._placed()
        for own, view in self.inner.parts(tensor):
            for whole, there in placed:
                if (common := own.common(there)) is not None:
                    steps = zip(whole.offsets, common.offsets, there.offsets, strict=True)
                    box = Box(tuple(a + b - c for a, b, c in steps), common.sizes)
                    found.append((box, view[common.within(own)]))
        return found

    def _placed(self) -> list[tuple[Box, Box]]:
        """Each box of the outer part, and where it is in that part."""
        found = []
        for box, view in self.outer.parts(torch.empty(self.outer.local, device="meta")):
            at, offsets = int(view.storage_offset()), []
            for size in reversed(self.outer.local):
                at, offset = divmod(at, size or 1)
                offsets.append(offset)
            found.append((box, Box(tuple(reversed(offsets)), box.sizes)))
        return found


@dataclass(frozen=True, eq=False)
class Part:
    """A task's part of a tensor, in a state that is to be saved.

    Args:
        tensor: What the task has.
        cut: Which part it is.
    """

    tensor: Tensor
    cut: Cut


def part_of(value: Any, cut: Cut | None) -> Any:
    """What an optimizer's state has of a cut parameter: a part, or what is whole, as a counter."""
    if cut is None or not isinstance(value, Tensor) or tuple(value.shape) != cut.local:
        return value
    return Part(value, cut)


def boxes_of_span(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The fewest boxes that are the elements ``start`` to ``stop`` of a tensor, in their order."""
    if start >= stop:
        return []
    if not shape or (start, stop) == (0, math.prod(shape)):
        return [Box.all_of(shape)]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside of one row
        return _in_row(shape, last, start - last * row, stop - last * row)
    found = _in_row(shape, first - 1, start - (first - 1) * row, row) if start % row else []
    if first < last:
        found.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return [*found, *_in_row(shape, last, 0, stop - last * row)]


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    inner = boxes_of_span(shape[1:], start, stop)
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in inner]


def gap(shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """What keeps ``boxes`` from being all of a tensor, each element once; "" if nothing does."""
    found = list(boxes)
    if outside := [box for box in found if not box.fits(shape)]:
        return f"a part {outside[0].sizes} at {outside[0].offsets} lies outside of it"
    for one, other in combinations(found, 2):
        if one.common(other) is not None:
            return f"the parts at {one.offsets} and {other.offsets} overlap"
    there, all_ = sum(box.numel for box in found), math.prod(shape)
    if there != all_ or not found:
        return f"its parts have {there} of {all_} elements"
    return ""
