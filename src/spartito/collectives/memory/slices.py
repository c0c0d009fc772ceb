"""Rows of tensors cut into a slice per replica, and the shared memory that slices travel through.

    | of replica 0: from 1, from 2 | of 1: from 0, from 2 | of 2: ... | results of 0, 1, 2 |

Each writes the slices of others where these read them, and finds its own from all others. Its
result lies where all read it: two synchronizations, and no byte is moved that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spartito.collectives.collective import Piggybacked

if TYPE_CHECKING:
    from spartito.collectives.memory.shared_memory import SharedMemoryCollective

LINE = 64  # bytes of a cache line
GRAIN = 64  # elements: kernels compute so many, or a part of so many, in one go


@dataclass(frozen=True, slots=True)
class Section:
    """Elements ``start`` to ``stop`` of tensor number ``tensor``, which are ``owner``'s.

    ``offset`` is where they begin in the row of all tensors, in bytes.
    """

    tensor: int
    start: int
    stop: int
    owner: int
    offset: int
    whole: bool


def cut(sizes: Sequence[tuple[int, int]], parts: int) -> tuple[list[Section], int]:
    """Cut tensors, each ``(elements, bytes of an element)``, into ``parts`` of nearly equal bytes.

    Cuts are where a kernel's blocks end, so that it computes the same whether a tensor is cut or
    not. Returns the sections in order, and the bytes of the row.
    """
    starts, end = [], 0
    for numel, itemsize in sizes:
        starts.append(end)
        end += -(-numel * itemsize // LINE) * LINE
    bounds = [end * part // parts for part in range(1, parts)]
    sections: list[Section] = []
    owner = 0
    for number, (first, (numel, itemsize)) in enumerate(zip(starts, sizes, strict=True)):
        begin = 0
        while True:
            stop = numel
            if owner < len(bounds):  # rounded to the nearest block
                grain = GRAIN * itemsize
                blocks = (bounds[owner] - first + grain // 2) // grain
                stop = max(begin, min(numel, blocks * GRAIN))
            if stop > begin or numel == 0:
                whole = stop - begin == numel
                sections.append(
                    Section(number, begin, stop, owner, first + begin * itemsize, whole)
                )
            begin = stop
            if begin == numel:
                break
            owner += 1
    return sections, end


class Slices:
    """The memory of one such row, for replicas on one machine.

    ``tag`` is the call that an exchange is (`collectives.calls`).
    """

    def __init__(self, shared: SharedMemoryCollective, size: int, tag: int) -> None:
        self._shared, self._size, self._tag = shared, max(size, LINE), tag
        self._segment = shared.segment(self._size * shared.world_size)

    def sent(self, section: Section, sender: int, dtype: torch.dtype) -> Tensor:
        """Where ``sender`` puts its part of a section that is another's, flat."""
        row = sender - (sender > section.owner)  # nobody sends to himself
        return self._tensor(row, section, dtype)

    def result(self, section: Section, dtype: torch.dtype) -> Tensor:
        """Where its owner puts what all read, flat."""
        return self._tensor(self._shared.world_size - 1, section, dtype)

    def meet(self, piggybacked: Piggybacked) -> Piggybacked:
        """Wait until all have sent; returns the sum of each piggybacked scalar."""
        with self._shared.current_call.call(self._tag):
            total = self._shared.exchange_piggybacked(piggybacked)
        self._shared.traffic.moved(self._size)
        return total

    def finish(self) -> None:
        """Wait until all results are there, and what was sent is read."""
        with self._shared.current_call.call(self._tag):
            self._shared.synchronize()

    def _tensor(self, row: int, section: Section, dtype: torch.dtype) -> Tensor:
        offset = row * self._size + section.offset
        return self._segment.tensor(offset, section.stop - section.start, dtype)
