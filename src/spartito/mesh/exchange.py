"""Collectives on activations between tasks of one machine: written once, read once.

An activation crosses tens of times in a step, so that each crossing has one synchronization: every
task writes what others need into its slot, and reads theirs straight into the result. The slots
are used in turn, so the next crossing may be written while this one is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spartito.collectives.calls import encode
from spartito.collectives.memory.shared_memory import SharedMemoryCollective

SMALLEST = 1 << 20  # bytes of the first slots; more are made when a larger tensor comes
WHOLE = 256 << 10  # bytes up to which each of several tasks adds up everything


class Exchange:
    """Memory of the tasks along one axis, which are on one machine.

    Args:
        shared: Their group.
    """

    def __init__(self, shared: SharedMemoryCollective) -> None:
        self._shared = shared
        self.size, self.index = shared.world_size, shared.rank
        self._slot = 0
        self._turn = 0
        self._slots: list[list[Tensor]] = []
        self._views: dict[tuple[int, torch.Size, torch.dtype, int], list[Tensor]] = {}
        self._tags: dict[tuple[str, torch.Size, torch.dtype], int] = {}

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the tasks, in rank order, in new memory."""
        numel = tensor.numel()
        if self.size > 2 and numel * tensor.itemsize > WHOLE:
            flat = tensor.reshape(-1)
            part = -(-numel // self.size)
            flat = torch.nn.functional.pad(flat, (0, part * self.size - numel))
            return self.all(self.sum_own(flat, 0), 0)[:numel].view(tensor.shape)
        shown = self._of(tensor.shape, tensor.dtype)
        shown[self.index].copy_(tensor)
        self._meet("all_reduce", tensor.shape, tensor.dtype)
        return self._added(shown, tensor)

    def all(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all tasks, joined along ``dim``."""
        shown = self._of(tensor.shape, tensor.dtype)
        shown[self.index].copy_(tensor)
        self._meet("all_gather", tensor.shape, tensor.dtype)
        return torch.cat([*shown[: self.index], tensor, *shown[self.index + 1 :]], dim)

    def sum_own(self, tensor: Tensor, dim: int) -> Tensor:
        """This task's part along ``dim`` of the sum over the tasks."""
        parts = tensor.chunk(self.size, dim)
        shown = self._of(parts[0].shape, tensor.dtype, self.size)
        for to, part in enumerate(parts):
            if to != self.index:
                shown[self.index * self.size + to].copy_(part)
        self._meet("reduce", tensor.shape, tensor.dtype)
        return self._added(shown[self.index :: self.size], parts[self.index])

    def _added(self, shown: list[Tensor], own: Tensor) -> Tensor:
        """The parts added up in rank order; ``own`` is this task's, where it still lies warm."""
        parts = [*shown[: self.index], own, *shown[self.index + 1 :]]
        total = torch.add(parts[0], parts[1])
        for part in parts[2:]:
            total.add_(part)
        return total

    def _of(self, shape: torch.Size, dtype: torch.dtype, parts: int = 1) -> list[Tensor]:
        """The slots of this turn, of each so many tensors; more memory where it is too small."""
        self._turn = 1 - self._turn
        key = self._turn, shape, dtype, parts
        found = self._views.get(key)
        if found is None:
            numel = shape.numel()
            self._grow(parts * numel * dtype.itemsize)
            if len(self._views) > 256:
                self._views.clear()
            slots = [slot[: parts * numel * dtype.itemsize] for slot in self._slots[self._turn]]
            found = [
                part.view(shape) for slot in slots for part in slot.view(dtype).tensor_split(parts)
            ]
            self._views[key] = found
        return found

    def _grow(self, size: int) -> None:
        """Have slots of ``size`` bytes."""
        if size <= self._slot:
            return
        self._slot = max(SMALLEST, 1 << (size - 1).bit_length())
        segment = self._shared.segment(2 * self.size * self._slot)
        starts = [
            [(turn * self.size + rank) * self._slot for rank in range(self.size)] for turn in (0, 1)
        ]
        self._slots = [
            [segment.tensor(start, self._slot, torch.uint8) for start in each] for each in starts
        ]
        self._views.clear()

    def _meet(self, what: str, shape: torch.Size, dtype: torch.dtype) -> None:
        """Wait until all have written, at the same call, a tensor that lies alike."""
        key = what, shape, dtype
        tag = self._tags.get(key)
        if tag is None:
            if len(self._tags) > 4096:
                self._tags.clear()
            # Its number among reducers is never used here: the order of dims goes there.
            tag = self._tags[key] = encode(what, shape.numel(), dtype, hash(tuple(shape)))
        shared = self._shared
        current = shared.current_call
        before = current.tag
        current.tag = before or current.purpose << 58 | tag
        try:
            shared.synchronize()
        finally:
            current.tag = before
        shared.traffic.moved(shape.numel() * dtype.itemsize)
