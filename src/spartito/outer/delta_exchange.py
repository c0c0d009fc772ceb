"""How what groups have moved goes from leader to leader: whole, or in fewer bits.

What a message leaves out is kept, and added to what is sent at the next meeting (error feedback:
Seide et al. 2014, Karimireddy et al. 2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from spartito.collectives.collective import Collective
from spartito.collectives.staged import to_host
from spartito.engine.gradients import compression
from spartito.engine.gradients.codes import Code
from spartito.engine.gradients.compression import Compress, PowerSGD
from spartito.errors import UserError


def choose(compress: Compress) -> Callable[[], Exchange]:
    """What makes the exchange of one prepared model.

    Args:
        compress: As `spartito.engine.gradients.compression.choose` takes it, but for PowerSGD.

    Returns:
        A function that makes it.

    Raises:
        UserError: For anything else.
    """
    way = compression.choose(compress)
    if isinstance(way, PowerSGD):
        raise UserError(
            f"compress={compress!r} of what groups have moved: shards of it are no matrices",
            "Choose 'bf16', '8bit', '4bit', 'topk' or 'topk:FRACTION'; inside of a group "
            'inside=multi_worker_mirrored(compress="powersgd") sends gradients so.',
        )
    return Whole if way is None else partial(Compressed, way)


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
        packed = to_host(self._code.pack(wanted.float()))
        head = numbers.view(torch.uint8)
        parts = between.all_gather(torch.cat([head, packed]))
        shares = [part[: len(head)].clone().view(numbers.dtype) for part in parts]
        moved.zero_()
        for rank, (share, part) in enumerate(zip(shares, parts, strict=True)):
            if share[0]:
                there = part[len(head) :].to(moved.device)
                sent = self._code.unpack(there, numel).to(moved.dtype)
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
