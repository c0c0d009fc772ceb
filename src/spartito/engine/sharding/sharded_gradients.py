"""Gradients that are reduced block by block, each to the replicas that have its shards."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isnan
from typing import Any
from weakref import ref
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spartito.collectives.collective import Collective, Piggybacked, scale_of
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.engine.devices.host_reads import Number
from spartito.engine.drift import OTHERS_LEARN, different, outliers
from spartito.engine.gradients.compression import CompressedSum, Compression
from spartito.engine.gradients.gradient_sum import (
    Accumulated,
    different_batches,
    quotient,
    refuse_sparse,
)
from spartito.engine.sharding.hidden_parameters import asleep
from spartito.engine.sharding.homes import BlockOfHome, Home, settle
from spartito.engine.sharding.shard_parts import parts_of
from spartito.engine.updates.divided_update import DividedUpdates, Span

MANY = 1 << 20
"""More than there are replicas: two counts travel as one number."""


class ShardedGradients(DividedUpdates):
    """Each replica keeps the sums of its shards; whole gradients wait in ``.grad`` until then.

    Inside of `early` a block is reduced as soon as backward has its last gradient, and its
    ``.grad`` go. All replicas do so in one order, the blocks' own from the last to the first: one
    whose gradient is late, or does not come on some replica, holds up those behind it until the
    backward pass ends. Elsewhere, as in a loop of the user's own, blocks are reduced in `reduce`.

    ``homes`` has the block of each parameter by its id. ``owners`` have its shards; ``replicas``
    are the tasks that have the same shards: their sums are added up once, in `reduce`.

    With a ``compression`` all of a block is summed over all tasks, once for an update, and each
    takes its shard of that: what is coded together, or is a matrix, belongs to several shards.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        collective: Collective,
        homes: Mapping[int, Home],
        owners: Collective,
        replicas: Collective,
        learned: Sequence[nn.Parameter] = (),
        compression: Compression | None = None,
    ) -> None:
        self._homes, self._replicas = homes, replicas
        self._is_whole = compression is not None
        self._is_last = True
        self._hooks: list[RemovableHandle] = []
        self._blocks: list[_Block | BlockOfHome] = []
        self._is_early = self._discards = self._is_passing = False
        self.are_met = False
        """Whether all meet behind each update anyway."""
        self._next = 0  # the block that is reduced next in this backward pass
        self._used: set[int] = set()  # by id: had a gradient here since the last update
        super().__init__(optimizer, collective, owners, learned, compression)

    @contextmanager
    def early(self) -> Generator[None]:
        """A block in which backward passes reduce what is ready."""
        self._is_early = True
        try:
            yield
        finally:
            self._is_early = False

    def before_forward(self, is_last: bool, epoch: int) -> None:
        super().before_forward(is_last, epoch)
        self._is_last = is_last
        group = self._collective
        by_torch = not all(isinstance(block, _Block) for block in self._blocks)
        if by_torch and isinstance(group, ProcessGroupCollective) and group.is_gloo:
            with group.current_call.during("step"):
                self._compare_what_learns(group)

    def _compare_what_learns(self, group: ProcessGroupCollective) -> None:
        """Find who is at another call, or freezes alone, before torch's own calls abort by that."""
        mine = crc32(
            bytes(p.requires_grad for block in self._blocks for p in block.home.parameters)
        )
        found = [int(each) for each in group.all_gather(torch.tensor([mine]))]
        if unlike := outliers(found):
            raise different(group, unlike, *OTHERS_LEARN)

    def gather(self) -> None:
        for home in dict.fromkeys(self._homes.values()):
            home.gather_to_stay()

    def begin(self, loss_divisor: float) -> float:
        found = super().begin(loss_divisor)
        if self._is_early and (self._is_last or not self._is_whole):
            self._is_passing, self._next = True, 0
        for block in self._blocks:
            block.begin_pass(self._is_passing)
        return found

    def add(self, loss: Number, weight: Number) -> None:
        super().add(loss, weight)
        if self._is_passing:
            self._reduce_until(len(self._blocks))
            self._is_passing = False
        for block in self._blocks:
            block.end_pass()

    @contextmanager
    def discarding(self) -> Iterator[None]:
        self._discard(True)
        try:
            with super().discarding():
                yield
        finally:
            self._discard(False)

    def _discard(self, discards: bool) -> None:
        self._discards = discards
        for block in self._blocks:
            block.discard(discards)

    def clear(self) -> None:
        super().clear()
        self._used.clear()
        for block in self._blocks:
            block.clear()
        for part in self._parts.values():
            part.own.grad = None

    @property
    def _holds_any(self) -> bool:
        return super()._holds_any or any(block.holds_any for block in self._blocks)

    @property
    def _where(self) -> torch.device:
        return next((block.home.own.device for block in self._blocks), super()._where)

    def update(self, step: Callable[[], None]) -> None:
        super().update(step)
        self._updated()
        for block in self._blocks:
            block.home.publish()
            block.home.updated()
        if not self.are_met and any(block.home.is_shared for block in self._blocks):
            self._owners.barrier()

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def own_state(self) -> Iterator[tuple[nn.Parameter, Mapping[str, Any]]]:
        """The optimizer's state of this replica's elements, by the parameters."""
        self.adopt()
        return ((part.whole, part.state) for part in self._parts.values() if part.state)

    def reduce(self, piggybacked: Piggybacked = ()) -> tuple[Number, Number, Piggybacked]:
        learn = self._learning()
        homes = dict.fromkeys(self._homes.values())
        left = any(parameter.grad is not None for parameter in learn)
        written = any(home.is_written for home in homes)
        self._used.update(id(p) for p in learn if p.grad is not None)
        absent = len(learn) - len(self._used) if self.counts else 0
        own = self._weighed
        flags = float(left + written * MANY)
        brought = (*own.on_host, *piggybacked, flags, float(absent))
        total = self._all((*brought, self.loss_divisor))
        if total[-1] != self.loss_divisor * self._collective.world_size:
            raise different_batches(self.loss_divisor)
        if total[-3] % MANY:
            for block in self._blocks:
                block.reduce()
        settle(homes, self._collective, total[-3] // MANY)
        self.absent = total[-2]
        idle = self._idle() if self.absent else frozenset()
        self._meet_replicas()
        weight, loss = own.total(total)
        factor: Number = scale_of(total[0], self.loss_divisor)
        if isnan(total[0]):  # the device knows it, or nobody does
            factor = quotient(self.loss_divisor, weight)
        for block in self._blocks:
            if isinstance(factor, Tensor) or factor != 1.0:
                block.scale(factor)
            block.give(idle)
        return weight, loss, total[2:-3]

    def accumulated(self) -> Accumulated:
        """As `Gradients.accumulated`; whole, on all replicas."""
        if self._is_whole:  # they wait in `.grad`
            return super().accumulated()
        for block in self._blocks:
            block.reduce()
        self._meet_replicas()
        grads: dict[int, Tensor] = {}
        for block in self._blocks:
            parameters = block.home.parameters
            grads |= {id(p): g for p, g in zip(parameters, block.whole_sums(), strict=True)}
            if self._replicas.rank:  # what was added up counts once
                block.scale(0.0)
        idle = self._idle()
        sums = torch.tensor([self.weight, self.loss], dtype=torch.float64)
        weight, loss = self._collective.all_reduce(sums).tolist()
        found = [None if id(p) in idle else grads[id(p)] for p in self.parameters]
        return Accumulated(found, self.loss_divisor, weight, loss)

    def _all(self, scalars: Piggybacked) -> Piggybacked:
        if self._blocks and self._replicas.world_size == 1:
            return self._blocks[0].home.stage.sum(scalars)
        return tuple(
            self._collective.all_reduce(torch.tensor(scalars, dtype=torch.float64)).tolist()
        )

    def _meet_replicas(self) -> None:
        if self._replicas.world_size > 1 and not self._is_whole:
            for block in self._blocks:
                block.meet(self._replicas)

    def _idle(self) -> frozenset[int]:
        """The parameters (by id) that no replica has a gradient for."""
        used = torch.tensor([float(id(p) in self._used) for p in self.parameters])
        counts = self._collective.all_reduce(used).tolist()
        pairs = zip(self.parameters, counts, strict=True)
        return frozenset(id(parameter) for parameter, count in pairs if not count)

    def _plan(self) -> None:
        self._checked = False
        self.leave()
        waiting = {id(b.home): b.sums for b in self._blocks if isinstance(b, _Block)}
        learn = {id(parameter) for parameter in self.parameters}
        homes = dict.fromkeys(self._homes[key] for key in map(id, self.parameters))
        order = {id(home): number for number, home in enumerate(self._homes.values())}
        self._blocks = [
            home.block(learn, self._used)
            or _Block(home, learn, self._used, self._sum_of(home), waiting.get(id(home)))
            for home in sorted(homes, key=lambda home: -order[id(home)])
        ]
        here = ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_tell, here, number))
            for number, block in enumerate(self._blocks)
            if isinstance(block, _Block)
            for parameter in block.home.parameters
            if id(parameter) in learn and parameter.requires_grad
        ]
        self._parts.clear()
        self._state.clear()
        for block in self._blocks:
            self._parts |= block.parts
            for rank in range(block.home.layout.shards):
                for section in block.home.layout.shard(rank):
                    key = id(block.home.parameters[section.parameter])
                    found = [s for s in self.spans.get(key, ()) if s.rank != rank]
                    self.spans[key] = [*found, Span(rank, section.start, section.stop)]
        self.adopt()

    def _sum_of(self, home: Home) -> CompressedSum | None:
        """What sums all of a block, where that is sent compressed."""
        if not self._is_whole:
            return None
        with asleep():
            return CompressedSum(home.parameters, self._collective, self.compression)

    def _tell(self, number: int) -> None:
        """A parameter of the block ``number`` has its gradient."""
        if not self._is_passing:
            return
        block = self._blocks[number]
        block.missing -= 1
        if number == self._next and block.missing <= 0:
            ready = number
            while ready < len(self._blocks) and self._blocks[ready].missing <= 0:
                ready += 1
            self._reduce_until(ready)

    def _reduce_until(self, end: int) -> None:
        while self._next < end:
            block = self._blocks[self._next]
            if isinstance(block, _Block):
                block.reduce(counts=not self._discards)
            self._next += 1


def _tell(gradients: Callable[[], ShardedGradients | None], number: int, given: Tensor) -> None:
    found, hooks = gradients(), given._post_accumulate_grad_hooks
    last = next(reversed(hooks.values())) if hooks else None
    if found is not None and getattr(last, "func", None) is _tell:  # else a hook comes behind
        found._tell(number)


class _Block:
    """What waits for an update of one block's parameters, and how it comes to its shards."""

    def __init__(
        self,
        home: Home,
        learn: set[int],
        used: set[int],
        whole: CompressedSum | None,
        sums: Tensor | None = None,
    ) -> None:
        self.home, self.sums, self.whole = home, sums, whole
        self.is_sent = False
        """Whether it was summed, compressed, since the last update."""
        self._learn, self._used = learn, used
        layout = home.layout
        self.count = sum(id(p) in learn and p.requires_grad for p in home.parameters)
        self.missing = self.count
        self.parts = parts_of(home, learn)
        most = home.stage.length(home.dtype)
        self._rounds = []
        for start in range(0, layout.length, most):
            length = min(most, layout.length - start)
            firsts = [owner * layout.length + start for owner in range(layout.shards)]
            sections = [layout.sections(first, first + length) for first in firsts]
            self._rounds.append((start, length, sections))

    @property
    def sum(self) -> Tensor:
        """This replica's shard of the sums, flat."""
        if self.sums is None:
            self.sums = self.home.own.new_zeros(self.home.layout.length)
        return self.sums

    def begin_pass(self, syncs: bool) -> None:
        """Before a backward pass, in which gradients are reduced, or not."""
        self.missing = self.count

    def end_pass(self) -> None:
        """After it."""

    def discard(self, discards: bool) -> None:
        """Whether what comes counts for nothing: `reduce` is told."""

    @property
    def holds_any(self) -> bool:
        """Whether there are sums."""
        return self.sums is not None

    def clear(self) -> None:
        """Forget them."""
        self.sums, self.is_sent = None, False

    def scale(self, factor: Number) -> None:
        """Multiply them."""
        self.sum.mul_(factor)

    def meet(self, replicas: Collective) -> None:
        """Add up those of the tasks that have the same shards; all call it."""
        replicas.all_reduce(self.sum)

    def whole_sums(self) -> list[Tensor]:
        """Those of all shards, by the parameters; all call it."""
        whole = self.sum.new_zeros(self.home.size)
        self.home.stage.spread(self.sum, whole.view(self.home.layout.shards, -1))
        return self.home.views(whole)

    def reduce(self, counts: bool = True) -> None:
        """Add the gradients that wait on all replicas to the shards; all replicas call it.

        Those of this replica only where they are to count.
        """
        home = self.home
        learn = self._learn if counts else ()
        refuse_sparse([p for p in home.parameters if id(p) in learn])
        grads = [p.grad if id(p) in learn else None for p in home.parameters]
        flat = [None if grad is None else grad.detach().reshape(-1) for grad in grads]
        if self.whole is None:
            self._reduce_shards(flat)
        else:
            self._reduce_whole(flat, self.whole)
        for parameter, grad in zip(home.parameters, grads, strict=True):
            if grad is not None:
                self._used.add(id(parameter))
                parameter.grad = None
        home.free()

    def _reduce_whole(self, flat: Sequence[Tensor | None], whole: CompressedSum) -> None:
        """Sum all of the block, and add this replica's shard of that."""
        layout = self.home.layout
        for part, grad in zip(whole.input.split(list(layout.sizes)), flat, strict=True):
            part.zero_() if grad is None else part.copy_(grad)
        total = whole.run(exactly=self.is_sent)
        self.is_sent = True
        first = self.home.stage.group.rank * layout.length
        mine = total[first : first + layout.length]
        self.sum[: len(mine)].add_(mine)

    def _reduce_shards(self, flat: Sequence[Tensor | None]) -> None:
        """Let the owner of each shard add up what all have for it, round after round."""
        stage, dtype = self.home.stage, self.home.dtype
        is_new, sums = self.sums is None, self.sum
        for start, length, sections in self._rounds:
            rows = stage.rows(length, dtype)
            targets, sources = [], []
            for row, parts in zip(rows, sections, strict=True):
                for section in parts:
                    target = row[section.offset : section.offset + section.stop - section.start]
                    source = flat[section.parameter]
                    if source is None:
                        target.zero_()
                    else:
                        targets.append(target)
                        sources.append(source[section.start : section.stop])
            if targets:
                torch._foreach_copy_(targets, sources)
            first, *others = stage.meet()
            into = sums[start : start + length]
            if not is_new:
                into.add_(first)
            elif others:
                torch.add(first, others.pop(0), out=into)
            else:
                into.copy_(first)
            for part in others:
                into.add_(part)

    def give(self, idle: frozenset[int]) -> None:
        """Let the optimizer find the sums."""
        for key, part in self.parts.items():
            part.own.grad = None if key in idle else part.of(self.sum)
