"""How a block's values travel between the replicas that have its shards, in rounds of some MB."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from spartito.collectives.calls import encode
from spartito.collectives.collective import Collective, Piggybacked
from spartito.collectives.memory.shared_memory import SharedMemoryCollective

ROUND = 4 << 20
"""Bytes that a replica shows in one round, over all shards."""


class Stage(ABC):
    """Where the replicas of a group show each other values, a row for each owner of a shard.

    All make the same calls in the same order; a round is `rows`, which the caller fills, and
    `meet`, which brings what the others have for one's own shard.
    """

    def __init__(self, group: Collective, device: torch.device) -> None:
        self.group, self.device = group, device

    def length(self, dtype: torch.dtype) -> int:
        """The most elements of a row."""
        return ROUND // self.group.world_size // dtype.itemsize

    @abstractmethod
    def rows(self, length: int, dtype: torch.dtype) -> Tensor:
        """What to fill now: a row of ``length`` for each owner."""

    @abstractmethod
    def meet(self) -> Sequence[Tensor]:
        """What all have shown for this replica's shard, to be added up in this order."""

    @abstractmethod
    def spread(self, own: Tensor, whole: Tensor) -> None:
        """Give all the shards to all: ``whole`` gets a row of each, of which ``own`` is ours.

        ``own`` may lie there already.
        """

    def sum(self, piggybacked: Piggybacked) -> Piggybacked:
        """The sum of each scalar over the replicas."""
        both = torch.tensor(piggybacked, dtype=torch.float64)
        return tuple(self.group.all_reduce(both).tolist())


class SharedStage(Stage):
    """On one machine: rows lie in memory of all, in two rows in turn: one meeting is enough.

    | of replica 0: for 0, for 1 | of 1: for 0, for 1 | and the same once more |
    """

    def __init__(self, group: SharedMemoryCollective) -> None:
        super().__init__(group, torch.device("cpu"))
        self._shared, self._turn = group, 0
        self._segment = group.segment(2 * group.world_size * ROUND)
        self._known: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def rows(self, length: int, dtype: torch.dtype) -> Tensor:
        self._turn = 1 - self._turn
        self._now = [
            self._of(rank, dtype)[: self.group.world_size * length].view(-1, length)
            for rank in range(self.group.world_size)
        ]
        return self._now[self.group.rank]

    def meet(self) -> Sequence[Tensor]:
        self._synchronize(self._now[0])
        return [rows[self.group.rank] for rows in self._now]

    def spread(self, own: Tensor, whole: Tensor) -> None:
        step, rank = ROUND // own.element_size(), self.group.rank
        for start in range(0, own.numel(), step):
            part = slice(start, min(start + step, own.numel()))
            self._turn = 1 - self._turn
            shown = [
                self._of(other, own.dtype)[: part.stop - start]
                for other in range(self.group.world_size)
            ]
            shown[rank].copy_(own[part])
            self._synchronize(shown[0])
            for other, row in enumerate(shown):
                if other != rank:
                    whole[other, part] = row
        if own.data_ptr() != whole[rank].data_ptr():
            whole[rank] = own

    def sum(self, piggybacked: Piggybacked) -> Piggybacked:
        with self.group.current_call.call(encode("reduce", len(piggybacked), torch.float64)):
            return self._shared.exchange_piggybacked(piggybacked)

    def _of(self, rank: int, dtype: torch.dtype) -> Tensor:
        """All that a replica can show in this turn, flat."""
        key = self._turn, rank, dtype
        if key not in self._known:
            first = (self._turn * self.group.world_size + rank) * ROUND
            self._known[key] = self._segment.tensor(first, ROUND // dtype.itemsize, dtype)
        return self._known[key]

    def _synchronize(self, shown: Tensor) -> None:
        with self.group.current_call.call(encode("reduce", shown.numel(), shown.dtype)):
            self._shared.synchronize()
        self.group.traffic.moved(shown.nbytes)


class SentStage(Stage):
    """In any other group: a row goes to its owner."""

    def rows(self, length: int, dtype: torch.dtype) -> Tensor:
        self._out = torch.empty(self.group.world_size, length, dtype=dtype, device=self.device)
        return self._out

    def meet(self) -> Sequence[Tensor]:
        return [self.group.reduce_scatter(self._out)]

    def spread(self, own: Tensor, whole: Tensor) -> None:
        self.group.all_gather_into(whole, own)


def make_stage(group: Collective, device: torch.device) -> Stage:
    """The fastest way of a group, for values on a device; all of its tasks call this."""
    if isinstance(group, SharedMemoryCollective):
        return SharedStage(group)
    return SentStage(group, device)
