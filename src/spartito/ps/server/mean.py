"""The mean of several pushes that make one update."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from spartito.ps.protocol.keys import Key
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.messages import Push
from spartito.ps.server.shard import Shard


@dataclass
class Mean:
    """Pushes that are to make one update: their mean by weight.

    ``parties`` workers take part in a round of ``stream``; ``memory`` is memory that may be used.
    """

    stream: int = 0
    parties: int = 0
    total: Tensor = field(default_factory=lambda: torch.empty(0))
    weight: float = 0.0
    pushes: int = 0
    finite: int = 0  # those of them whose gradients were finite
    staleness: int = 0  # of all of them together
    share: float = 1.0
    absent: frozenset[int] | None = None
    keys: list[Key] = field(default_factory=list)
    examples: int = 0
    workers: set[int] = field(default_factory=set)
    parts: list[tuple[Push, Tensor]] = field(default_factory=list)
    done: bool = False

    def add(self, shard: Shard, push: Push, gradient: Tensor, memory: Tensor | None) -> None:
        """Mix one push in; the first uses the memory ``memory`` for the total."""
        if not self.finite:
            self.total = allocate(shard.span) if memory is None else memory.zero_()
        self.weight += push.weight
        self.share = push.share
        self.finite += 1
        shard.mix(self.total, gradient, push.weight, self.finite, push.absent, self.absent or ())
        self.note(push)
        missing = frozenset(push.absent)
        self.absent = missing if self.absent is None else self.absent & missing

    def note(self, push: Push) -> None:
        """Take over what a push was computed from."""
        self.keys += push.keys
        self.examples += push.examples

    def finish(self, shard: Shard, clip_norm: float | None) -> None:
        """Make the total the mean."""
        shard.divide(self.total, self.weight, self.finite)
        if clip_norm is not None:
            shard.clip(self.total, clip_norm)

    @property
    def fresh(self) -> float:
        """What its statistics count for, from 0 to 1; see `Store._update`."""
        return self.share * self.finite / (self.finite + self.staleness)
