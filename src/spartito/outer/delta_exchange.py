"""How what groups have moved goes from leader to leader: whole, or in fewer bits.

What a message leaves out is kept, and added to what is sent at the next meeting (error feedback:
Seide et al. 2014, Karimireddy et al. 2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from spartito.collectives.collective import Collective
from spartito.errors import UserError

_WAYS = "Choose 'bf16', '8bit', '4bit', 'topk' or 'topk:FRACTION', as 'topk:0.01'."


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
        rows = torch.zeros(-(-numel // self.block), self.block, dtype=torch.float32)
        where = indices.view(torch.int16).long().view(-1, self._kept)
        rows.scatter_(1, where, kept.view(torch.bfloat16).float().view(-1, self._kept))
        return rows.view(-1)[:numel]


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """Flat values as rows of blocks, the last one filled with zeros."""
    missing = -len(values) % block
    return (pad(values, (0, missing)) if missing else values).view(-1, block)


def choose(compress: str | None) -> Callable[[], Exchange]:
    """What makes the exchange of one prepared model.

    Args:
        compress: None, "bf16", "8bit", "4bit", "topk" or "topk:FRACTION".

    Returns:
        A function that makes it.

    Raises:
        UserError: For anything else.
    """
    if compress is None:
        return Whole
    known: dict[str, Code] = {
        "bf16": Rounded(), "8bit": Quantized(8), "4bit": Quantized(4), "topk": TopK(),
    }  # fmt: skip
    if isinstance(compress, str) and compress in known:
        code = known[compress]
        return lambda: Compressed(code)
    name, _, text = str(compress).partition(":")
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if name != "topk" or not 0 < fraction <= 1:
        raise UserError(f"compress={compress!r}", _WAYS)
    return lambda: Compressed(TopK(fraction))


class Exchange(ABC):
    """How leaders add up what their groups have moved."""

    error = torch.empty(0)
    """What was left out so far, on a leader; of no elements where nothing is."""

    @abstractmethod
    def add(self, moved: Tensor, numbers: Tensor, between: Collective) -> int:
        """Add up what all leaders have.

        Args:
            moved: How far this group moved, flat; becomes the sum of all groups', each times its
                share, which is the first of ``numbers``.
            numbers: Become their sums.
            between: The leaders.

        Returns:
            The bytes of ``moved`` that this leader sent.
        """


class Whole(Exchange):
    """All bits of it, also of what an earlier exchange has left out for a checkpoint."""

    def add(self, moved: Tensor, numbers: Tensor, between: Collective) -> int:
        if len(self.error) and numbers[0].item():
            moved.add_(self.error)
            self.error = torch.empty(0)
        moved.mul_(numbers[0].item())
        between.reduce_all(*([moved] if moved.numel() else []), numbers)
        return 2 * moved.nbytes * (between.world_size - 1) // between.world_size


class Compressed(Exchange):
    """In a code of fewer bits, with error feedback.

    Every leader unpacks what all have sent, its own too, so that all have the same sum.

    Args:
        code: The code.
    """

    def __init__(self, code: Code) -> None:
        self._code = code
        self._blocks = torch.empty(0)  # whole ones, of which the error is the beginning

    def add(self, moved: Tensor, numbers: Tensor, between: Collective) -> int:
        numel, counts = moved.numel(), numbers[0].item() != 0
        self._make_blocks(moved)
        error, wanted = self.error, self._blocks
        if counts:  # what was left out, and what is new
            whole = float(error.add_(moved).norm())
        else:
            wanted = torch.zeros_like(wanted)
        packed = self._code.pack(wanted.float())
        head = numbers.view(torch.uint8)
        parts = between.all_gather(torch.cat([head, packed]))
        shares = [part[: len(head)].clone().view(numbers.dtype) for part in parts]
        moved.zero_()
        for rank, (share, part) in enumerate(zip(shares, parts, strict=True)):
            if share[0]:
                sent = self._code.unpack(part[len(head) :], numel).to(moved.dtype)
                moved.add_(sent, alpha=share[0].item())
                if rank == between.rank:
                    error.sub_(sent)
        if counts:
            between.traffic.compression_error = float(error.norm()) / whole if whole else 0.0
        numbers.copy_(torch.stack(shares).sum(0))
        return len(packed) * (between.world_size - 1)

    def _make_blocks(self, moved: Tensor) -> None:
        """Have the error in memory of whole blocks."""
        numel, block = moved.numel(), self._code.block
        if self.error.data_ptr() == self._blocks.data_ptr() and len(self.error) == numel:
            return  # it was there at the last meeting
        before = self.error
        self._blocks = moved.new_zeros(-(-numel // block) * block)
        self.error = self._blocks[:numel]
        if len(before) == numel:  # of a checkpoint
            self.error.copy_(before)
