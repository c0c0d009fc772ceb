"""What waits for an update of the parameters of a block that FSDP2 has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spartito.collectives.collective import Collective
from spartito.engine.devices.host_reads import Number
from spartito.engine.sharding.shard_parts import parts_of

if TYPE_CHECKING:
    from spartito.engine.sharding.fully_sharded import FullyShardedHome


class FullyShardedBlock:
    """The sums that FSDP2 makes in backward passes, and what comes to the user's parameters.

    The latter are whole gradients that wait in ``.grad``: all those of a loop of the user's own,
    and those of parameters that were used without their module.

    Args:
        home: The block.
        learn: The ids of the optimizer's parameters.
        used: Gets the ids of those that had a gradient.
    """

    missing = 0

    def __init__(self, home: FullyShardedHome, learn: set[int], used: set[int]) -> None:
        self.home, self._learn, self._used = home, learn, used
        self.parts = parts_of(home, learn)

    def begin_pass(self, syncs: bool) -> None:
        """Before a backward pass.

        Args:
            syncs: Whether FSDP2 makes sums in it.
        """
        self.home.begin_pass(syncs)

    def end_pass(self) -> None:
        """After it."""
        self.home.end_pass()
        self._used.update(self.home.used & self._learn)

    def discard(self, discards: bool) -> None:
        """Let the next backward pass add zeros, or what it computes.

        Args:
            discards: Which of both.
        """
        self.home.discards = discards

    @property
    def holds_any(self) -> bool:
        """Whether there are sums."""
        return any(total is not None for total in self.home.sums)

    def clear(self) -> None:
        """Forget them."""
        self.home.clear_sums(self._learn)

    def scale(self, factor: Number) -> None:
        """Multiply them.

        Args:
            factor: By what.
        """
        if found := [total for total in self.home.sums if total is not None]:
            torch._foreach_mul_(found, factor)

    def meet(self, replicas: Collective) -> None:
        """Add up those of the tasks that have the same shards; all call it.

        Args:
            replicas: These tasks.
        """
        row = self.home.row(self.home.sums)
        replicas.all_reduce(row)
        self.home.clear_sums()
        self.home.add_to_sums(row)

    def whole_sums(self) -> list[Tensor]:
        """Those of all shards, by the parameters; all call it."""
        row = self.home.row(self.home.sums)
        rows = row.new_empty(self.home.layout.shards, self.home.layout.length)
        self.home.stage.spread(row, rows)
        return self.home.whole(rows)

    def reduce(self) -> None:
        """Add the whole gradients that wait on all replicas to the sums; all call it."""
        own = [p.grad if id(p) in self._learn else None for p in self.home.parameters]
        rows = self.home.rows([None if grad is None else grad.detach() for grad in own])
        self.home.add_to_sums(self.home.stage.group.reduce_scatter(rows))
        for parameter, grad in zip(self.home.parameters, own, strict=True):
            if grad is not None:
                self._used.add(id(parameter))
                parameter.grad = None

    def give(self, idle: frozenset[int]) -> None:
        """Let the optimizer find the sums.

        Args:
            idle: The ids of parameters that no replica has a gradient for.
        """
        found = zip(self.home.parameters, self.home.sums, strict=True)
        for parameter, total in found:
            part = self.parts.get(id(parameter))
            if part is not None:
                shown = None if id(parameter) in idle else total
                part.own.grad = None if shown is None else shown.view(part.own.shape)
