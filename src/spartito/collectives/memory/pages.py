"""Which pages of shared memory a process has made its own by writing into its view of them."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from spartito.collectives.memory.segment import Segment
from spartito.system.shared import forget_pages, page_kinds

PAGE = mmap.PAGESIZE


class PrivatePages:
    """A part of a segment's ``view``: pages that were written into there are this process's own.

    The kernel tells which; it begins and ends at a page.
    """

    def __init__(self, segment: Segment, offset: int, size: int) -> None:
        self._segment, self._offset, self._size = segment, offset, size
        self.are_told = True
        """Whether the kernel tells; else pages with the values of the shared ones are not found."""
        rows = size // PAGE, PAGE
        self._seen = segment.tensor(offset, size, torch.uint8, segment.view).view(rows)
        self._shared = segment.tensor(offset, size, torch.uint8).view(rows)

    def find(self) -> Tensor:
        """The numbers of the pages that are private."""
        first, count = self._seen.data_ptr() // PAGE, len(self._seen)
        found = page_kinds(first, count)
        self.are_told = found is not None
        if found is None:  # a system that hides it
            return (self._seen != self._shared).any(1).nonzero()[:, 0]
        kinds = torch.frombuffer(found, dtype=torch.int64) >> 61 & 7
        has_any, is_of_a_file = kinds != 0, kinds & 1 != 0  # in memory or swapped
        return (has_any & ~is_of_a_file).nonzero()[:, 0]

    @property
    def are_as_shared(self) -> bool:
        """Whether the private pages have what the shared ones have."""
        return all(
            torch.equal(self._seen[part], self._shared[part]) for part in self.find().split(256)
        )

    def forget_shared(self) -> None:
        """Let go of the shared mapping's pages, which stay in memory: they count twice here."""
        forget_pages(self._segment.map, self._offset, self._size)

    def drop(self) -> None:
        """See the shared pages everywhere."""
        forget_pages(self._segment.view, self._offset, self._size)
