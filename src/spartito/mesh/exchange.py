"""Collectives on activations between tasks of one machine: written once, read once.

An activation crosses tens of times in a step, so that each crossing has one synchronization: every
task writes what others need into its slot, and reads theirs straight into the result. The slots
are used in turn, so the next crossing may be written while this one is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spartito.collectives.calls import encode
from spartito.collectives.shared_memory import SharedMemoryCollective

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
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        self._tags: dict[tuple[str, torch.Size, torch.dtype], int] = {}

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the tasks, in rank order, in new memory."""
        numel = tensor.numel()
        if self.size > 2 and numel * tensor.itemsize > WHOLE:
            flat = tensor.reshape(-1)
            part = -(-numel // self.size)
            flat = torch.nn.functional.pad(flat, (0, part * self.size - numel))
            return self.all(self.sum_own(flat, 0), 0)[:numel].view(tensor.shape)
        slots = self._of(numel, tensor.dtype)
        slots[self.index].view(tensor.shape).copy_(tensor)
        self._meet("all_reduce", tensor.shape, tensor.dtype)
        return self._added([slot.view(tensor.shape) for slot in slots], tensor)

    def all(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all tasks, joined along ``dim``."""
        shape = tensor.shape
        slots = self._of(tensor.numel(), tensor.dtype)
        slots[self.index].view(shape).copy_(tensor)
        self._meet("all_gather", shape, tensor.dtype)
        parts = [slot.view(shape) for slot in slots]
        parts[self.index] = tensor
        return torch.cat(parts, dim)

    def sum_own(self, tensor: Tensor, dim: int) -> Tensor:
        """This task's part along ``dim`` of the sum over the tasks."""
        parts = tensor.chunk(self.size, dim)
        numel, shape = parts[0].numel(), parts[0].shape
        slots = self._of(tensor.numel(), tensor.dtype)
        for to, part in enumerate(parts):
            if to != self.index:
                slots[self.index][to * numel : (to + 1) * numel].view(shape).copy_(part)
        self._meet("reduce", tensor.shape, tensor.dtype)
        own = slice(self.index * numel, (self.index + 1) * numel)
        return self._added([slot[own].view(shape) for slot in slots], parts[self.index])

    def _added(self, parts: list[Tensor], own: Tensor) -> Tensor:
        """The parts added up in rank order; ``own`` is this task's, where it still lies warm."""
        parts[self.index] = own
        total = torch.add(parts[0], parts[1], out=None)
        for part in parts[2:]:
            total.add_(part)
        return total

    def _of(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """The slots of this turn as rows of so many elements; more memory where it is too small."""
        size = numel * dtype.itemsize
        if size > self._slot:
            self._slot = max(SMALLEST, 1 << (size - 1).bit_length())
            segment = self._shared.segment(2 * self.size * self._slot)
            starts = [
                [(turn * self.size + rank) * self._slot for rank in range(self.size)]
                for turn in (0, 1)
            ]
            self._slots = [
                [segment.tensor(start, self._slot, torch.uint8) for start in each]
                for each in starts
            ]
            self._views.clear()
        self._turn = 1 - self._turn
        key = self._turn, numel, dtype
        found = self._views.get(key)
        if found is None:
            if len(self._views) > 256:
                self._views.clear()
            found = [slot[:size].view(dtype) for slot in self._slots[self._turn]]
            self._views[key] = found
        return found

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
