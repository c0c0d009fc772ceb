"""Numbers in fewer bits: rounded to bf16 or to steps, or the largest alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad


class Code(Protocol):
    """Numbers as bytes, of which some is left out."""

    @property
    def block(self) -> int:
        """How many numbers are coded together: others are thought behind an incomplete block."""
        ...

    def pack(self, values: Tensor) -> Tensor:
        """The bytes of flat fp32 ``values``, as many for as many values."""
        ...

    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        """So many fp32 values of what `pack` returned."""
        ...


@dataclass(frozen=True, slots=True)
class Rounded:
    """Each number in bf16."""

    block: int = 1

    def pack(self, values: Tensor) -> Tensor:
        """Two bytes a number."""
        return values.bfloat16().view(torch.uint8)

    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        """As it was, to 8 bits of precision."""
        return packed.view(torch.bfloat16).float()


@dataclass(frozen=True, slots=True)
class Quantized:
    """Blocks of numbers as whole multiples of a step, which is the largest of them divided.

    Args:
        bits: Of a number, 8 or 4.
        block: How many numbers have one step, in bf16.
    """

    bits: int
    block: int = 256

    @property
    def _most(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def pack(self, values: Tensor) -> Tensor:
        """``bits + 16 / block`` bits a number."""
        rows = _in_blocks(values, self.block)
        steps = torch.maximum(rows.amax(1), rows.amin(1).neg_()).div_(self._most).bfloat16()
        wide = steps.float()
        wide.masked_fill_(wide == 0, 1)
        counts = (rows / wide[:, None]).round_().clamp_(-self._most, self._most)
        if self.bits == 4:  # the first half of each block in the lower bits, the second above it
            lower, upper = counts.chunk(2, 1)
            counts = lower.add_(upper, alpha=16)
        packed = counts.to(torch.int8).view(torch.uint8).view(-1)
        return torch.cat([steps.view(torch.uint8), packed])

    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        """Each number to half a step; all of a block that is not finite are NaN."""
        blocks = -(-numel // self.block)
        steps = packed[: 2 * blocks].view(torch.bfloat16).float()[:, None]
        counts = (
            packed[2 * blocks :].view(torch.int8).float().view(blocks, self.block * self.bits // 8)
        )
        if self.bits == 4:
            both = counts.new_empty(blocks, self.block)
            lower, upper = both.chunk(2, 1)
            torch.mul(counts, 1 / 16, out=upper).round_()  # the lower bits are 7/16 of it at most
            torch.add(counts, upper, alpha=-16, out=lower)
            counts = both
        return counts.mul_(steps).view(-1)[:numel]


@dataclass(frozen=True, slots=True)
class TopK:
    """The numbers of each block that are furthest from 0, in bf16, and where they are.

    Args:
        fraction: How many of them.
        block: How many numbers make a block.
    """

    fraction: float = 0.01
    block: int = 4096

    @property
    def _kept(self) -> int:
        return max(1, round(self.fraction * self.block))

    def pack(self, values: Tensor) -> Tensor:
        """Four bytes for each number that is kept."""
        rows = _in_blocks(values, self.block)
        indices = rows.abs().topk(self._kept, 1).indices
        kept = rows.gather(1, indices).bfloat16()
        both = (indices.to(torch.int16).view(-1), kept.view(-1))
        return torch.cat([each.view(torch.uint8) for each in both])

    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        """0 where nothing was kept."""
        indices, kept = packed.chunk(2)
        rows = packed.new_zeros(-(-numel // self.block), self.block, dtype=torch.float32)
        where = indices.view(torch.int16).long().view(-1, self._kept)
        rows.scatter_(1, where, kept.view(torch.bfloat16).float().view(-1, self._kept))
        return rows.view(-1)[:numel]


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """Flat values as rows of blocks, the last one filled with zeros."""
    missing = -len(values) % block
    return (pad(values, (0, missing)) if missing else values).view(-1, block)
