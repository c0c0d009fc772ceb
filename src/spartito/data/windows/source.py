"""Windows over tokens as a source of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from spartito.data.blocks.reading import BlockReader
from spartito.data.reading.collate import rows
from spartito.data.reading.order import Indices
from spartito.data.source import BatchSource, Found
from spartito.data.windows.token_blocks import TokenBlock, TokenBlocks, join

IGNORED = -100
"""The label that torch's losses leave out."""


@dataclass(frozen=True)
class Layout:
    """Which windows lie where: of ``width`` tokens, each ``step`` tokens behind the one before.

    Args:
        counts: How many tokens each block has.
        step: From the beginning of a window to that of the next one.
        width: Tokens of a window, of which the last one may be the first of the next window.
    """

    counts: Indices
    step: int
    width: int

    @cached_property
    def begins(self) -> Indices:
        """The first token of each block, and the number of all: ``(blocks + 1,)``."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    def __len__(self) -> int:
        """How many windows there are; tokens behind the last one are in none."""
        return max(0, (int(self.begins[-1]) - self.width) // self.step + 1)

    @cached_property
    def homes(self) -> Indices:
        """The blocks in which a window begins."""
        return np.flatnonzero(np.diff(self._firsts))

    @cached_property
    def edges(self) -> Indices:
        """The first window of each of `homes`, and the number of all."""
        return np.append(self._firsts[self.homes], len(self)).astype(np.int64)

    @property
    def _firsts(self) -> Indices:
        """The first window that does not begin before each of the blocks."""
        return np.minimum(-(-self.begins // self.step), len(self))

    def span(self, home: int) -> tuple[int, int, int]:
        """Where the windows of the block ``homes[home]`` lie.

        Returns:
            The block; where the first of them begins in it, and where the last one ends, which
            may be in a block behind it.
        """
        block = int(self.homes[home])
        first, last = int(self.edges[home]), int(self.edges[home + 1]) - 1
        begin = int(self.begins[block])
        return block, first * self.step - begin, last * self.step + self.width - begin


@dataclass(frozen=True, eq=False)
class WindowSource(BatchSource):
    """Windows over the tokens of all documents, one behind the other.

    Reading is safe from many threads.

    Args:
        blocks: Reads tokens.
        layout: Which windows there are.
        documents: Whether examples say where documents begin.
        for_transformers: Whether labels are the tokens themselves.
    """

    blocks: TokenBlocks
    layout: Layout
    documents: bool = False
    for_transformers: bool = False
    _own: dict[str, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """How many windows there are."""
        return len(self.layout)

    def __getstate__(self) -> dict[str, Any]:
        """Another process has threads of its own."""
        return {**self.__dict__, "_own": {}}

    @property
    def edges(self) -> Indices:
        """As `BlockSource.edges`: a window is of the block in which it begins."""
        return self.layout.edges

    @property
    def reader(self) -> BlockReader[TokenBlock]:
        """What reads the tokens of a block's windows."""
        if "reader" not in self._own:
            self._own.setdefault("reader", BlockReader(self.load))
        found: BlockReader[TokenBlock] = self._own["reader"]
        return found

    def expect(self, blocks: Sequence[int], live: int) -> None:
        """As `BlockSource.expect`.

        Raises:
            UserError: The documents are others than when they were opened.
        """
        self.blocks.documents.check_unchanged()
        self.reader.expect(blocks, live)

    def describe(self) -> str:
        """As `Described.describe`."""
        layout, column = self.layout, self.blocks.encoding.column
        return (
            f"{self.blocks.documents.name}, {int(layout.begins[-1]):,} tokens of the column "
            f"{column!r}\n{len(self):,} windows of {layout.step} in {len(layout.homes):,} blocks"
        )

    def load(self, home: int) -> TokenBlock:
        """The tokens from the beginning of a block's first window to the end of its last one.

        Raises:
            UserError: A block cannot be read.
        """
        block, start, stop = self.layout.span(home)
        found, size = [self.blocks.load(block)], int(self.layout.counts[block])
        while size < stop:
            block += 1
            found.append(self.blocks.load(block).part(0, stop - size))
            size += int(self.layout.counts[block])
        return join(found).part(start, stop)

    def __getitem__(self, index: int) -> Any:
        """One window."""
        return rows(self.read_batch([index]).data, lambda tensor: tensor[0])

    def read_batch(self, indices: Sequence[int]) -> Found:
        if not len(indices):
            return Found(None, [], [])
        wanted = np.asarray(indices, dtype=np.int64)
        home = np.searchsorted(self.edges, wanted, side="right") - 1
        blocks = self.reader.get(dict.fromkeys(home.tolist()))
        shape = len(wanted), self.layout.width
        tokens = np.empty(shape, np.int64)
        numbers, positions = (np.empty(shape, np.int64) for _ in range(2))
        for each, block in blocks.items():
            here = np.flatnonzero(home == each)
            at = (wanted[here] - self.edges[each])[:, None] * self.layout.step
            at = at + np.arange(self.layout.width)
            tokens[here] = block.tokens[at]
            if self.documents:
                numbers[here], positions[here] = within(block.starts, at)
        found = torch.from_numpy(tokens), torch.from_numpy(numbers), torch.from_numpy(positions)
        return Found(self._shaped(*found), list(range(len(wanted))), [])

    def _shaped(self, tokens: torch.Tensor, numbers: torch.Tensor, positions: torch.Tensor) -> Any:
        if self.for_transformers:
            if not self.documents:
                return {"input_ids": tokens, "labels": tokens.clone()}
            labels = tokens.masked_fill(positions == 0, IGNORED)
            return {"input_ids": tokens, "labels": labels, "position_ids": positions}
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if not self.documents:
            return x, y
        return {
            "input_ids": x,
            "position_ids": positions[:, :-1].contiguous(),
            "document_ids": numbers[:, :-1].contiguous(),
            "y": y.masked_fill(positions[:, 1:] == 0, IGNORED),
        }


def within(starts: Indices, at: Indices) -> tuple[Indices, Indices]:
    """Which document of its window each token is of, and which token of that.

    Args:
        starts: Where documents begin.
        at: Where the tokens of windows stand, ``(windows, width)``.

    Returns:
        Both from 0, of the shape of ``at``. A document that began before the window begins with it.
    """
    document = np.searchsorted(starts, at, side="right") - 1
    first = document[:, :1]
    return document - first, at - np.maximum(starts[document], at[:, :1])
