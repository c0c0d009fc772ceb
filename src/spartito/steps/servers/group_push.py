"""A group that trains apart while a lease lasts, and then pushes what it has moved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from math import isfinite
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from spartito.data.batch import Batch
from spartito.engine.batchnorm import average_statistics, local_batchnorms
from spartito.errors import TaskLostError, UserError
from spartito.outer.groups import (
    EQUAL,
)
from spartito.outer.synchronized_values import Shown
from spartito.ps.client.servers import Servers
from spartito.ps.protocol.layout import BUFFER
from spartito.ps.protocol.memory import is_summed
from spartito.ps.protocol.messages import Outcome, Push
from spartito.ps.protocol.options import set_options, settings
from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.timetable import Row
from spartito.ps.protocol.work import Arrival, WorkSource
from spartito.steps.prepared import Pair
from spartito.steps.servers.group_member import Inside
from spartito.steps.servers.group_state import OwnOptimizer, encode
from spartito.steps.servers.push import Pusher, WorkPosition


class Scheduled(Protocol):
    """Where the schedule's options are."""

    @property
    def step(self) -> int:
        """The global steps that are known to be done."""
        ...

    def at(self, step: int) -> Row | None:
        """The options of a global step; None where nothing was told."""
        ...


class GroupPusher(Pusher):
    """Trains apart while a lease lasts, and then pushes what it has moved.

    ``work`` says with whom that is merged; ``timetable`` has the schedule's options. The members of
    a group do all of this together, ``inside`` of it.
    """

    def __init__(
        self,
        pair: Pair,
        servers: Servers,
        rules: Rules,
        compute: Callable[[Batch], Any],
        work: WorkSource | None,
        weights: str,
        timetable: Scheduled,
        inside: Inside,
    ) -> None:
        super().__init__(pair, servers, rules, compute)
        self._work, self._is_equal, self._timetable = work, weights == EQUAL, timetable
        self._inside = inside
        self.own: OwnOptimizer = OwnOptimizer(pair, self.forget)
        if work is not None:
            work.keep(self.own)
        self._starts: list[Tensor] = []
        self._common: Row = []  # the options with which all members began
        self._updates = self._rows = self._examples = 0
        self._loss = self._weight = 0.0
        self._own: list[Tensor] = []  # aside, while the model shows the servers' values
        self._shown = Shown((), ())

    def ready(self, batch: Batch) -> None:
        """As `Pusher.ready`: the values that the group itself has, once it has begun."""
        if self._starts:
            self._take_back()
        else:
            self.servers.admit()
            self._begin_alike()
            self._starts = self._copies()
            self.own.kept = copy.deepcopy(self.own.state) if self._rules.in_step else None
        self._rows += batch.size

    def push(self) -> tuple[float, float]:
        """Make an update; it returns the loss and the weight in it. The last one is pushed."""
        current = self._here
        found = self._update(current)
        if current.is_last:
            self._meet(current)
        return found

    def arrive(self) -> None:
        """As `Pusher.arrive`: what became of a push is known at once."""

    def settle(self) -> None:
        """As `Pusher.settle`."""
        if self.pair.passes:
            self.push()
        if self._starts:
            self._meet(self._here)

    def leave(self) -> None:
        """Give up what was not pushed, and have the servers' values."""
        self.forget()
        super().leave()
        with suppress(TaskLostError):  # the first cause is what is told
            self.servers.look()

    def look(self) -> None:
        """As `Pusher.look`; the group's own values come back with its next batch."""
        if self._own:
            self._shown.check(list(self._parameters.values()))
        elif self._starts:
            self._own = self._copies()
        super().look()
        self.show()

    def show(self) -> None:
        """As `Pusher.show`: nobody may write into it until the next batch."""
        if self._own:
            self._shown = Shown(list(self._parameters), list(self._parameters.values()))

    @property
    def _parameters(self) -> dict[str, Tensor]:
        """By name."""
        vector = self.servers.vector
        pairs = zip(vector.layout.entries, vector.tensors, strict=True)
        return {entry.name: tensor for entry, tensor in pairs if entry.group != BUFFER}

    @property
    def _here(self) -> WorkPosition:
        if self.current is None:
            raise UserError(
                "an update outside of the batches that the chief gave out",
                "Iterate over strategy.distribute(data), and update once for each batch.",
            )
        return self.current

    def _copies(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.servers.vector.tensors]

    def forget(self) -> None:
        """Begin anew from the servers' values."""
        self._starts, self._own = [], []
        self.own.kept = None
        self._updates = self._rows = self._examples = 0
        self._loss = self._weight = 0.0

    @torch.no_grad()
    def _take_back(self) -> None:
        """Have one's own values again, after the servers' were looked at."""
        if self._own:
            self._shown.check(list(self._parameters.values()))
        tensors = self.servers.vector.tensors
        for tensor, own, start in zip(tensors, self._own, self._starts, strict=False):
            if is_summed(str(tensor.dtype).removeprefix("torch.")):
                tensor.add_(own - start)  # how it has changed is taken from the servers' values
            else:
                tensor.copy_(own)
        self._own = []

    def _begin_alike(self) -> None:
        """Have all members begin with the optimizer of the first one."""
        inside, optimizer = self._inside, self.pair.optimizer
        if not inside.several:
            return

        def told() -> bytes:
            state = encode(self.own.state) if self.own.is_new else b""
            return msgspec.msgpack.encode((settings(optimizer), state))

        self._common, state = msgspec.msgpack.decode(inside.tell(told), type=tuple[Row, bytes])
        if state and not inside.is_first:
            self.own.load(state)
        self.own.is_new = False

    def _update(self, current: WorkPosition) -> tuple[float, float]:
        """An update of one's own; returns the loss and the weight in it."""
        pair = self.pair
        drawn = () if pair.randomness is None else pair.randomness.piggybacked()
        first = self._inside.is_first
        brought = float(self.stops), first * float(self._timetable.step), float(self._rows), *drawn
        found = pair.gradients.reduce(brought)
        weight, loss = map(float, found[:2])
        stops, step, rows, *others = found[2]
        if pair.randomness is not None:
            pair.randomness.check(others)
        self.stops, self._rows, self._examples = stops > 0, 0, self._examples + int(rows)
        if weight:
            norm = pair.gradients.norm()
            if isfinite(norm):
                if pair.clip_norm is not None:
                    pair.gradients.clip(pair.clip_norm, norm)
                with self._options(int(step)):
                    pair.gradients.update(lambda: pair.loss_scale.step(pair.optimizer))
                self._loss, self._weight = self._loss + loss, self._weight + weight
            else:
                _spoil(current)
                weight = loss = 0.0
        self._updates += 1
        pair.gradients.clear()
        pair.passes = 0
        return loss, weight

    @contextmanager
    def _options(self, step: int) -> Generator[None]:
        """A block in which the optimizer has the schedule's options of this update.

        They begin at ``step``: that of the first member, of which all know equally little else.
        """
        groups, row = self.pair.optimizer.param_groups, self._timetable.at(step + self._updates)
        if self._common:
            more = row or [{}] * len(self._common)
            row = [{**all_, **new} for all_, new in zip(self._common, more, strict=True)]
        if not row or not any(row):
            yield
            return
        before = [
            {name: group[name] for name in new.keys() & group.keys()}
            for group, new in zip(groups, row, strict=True)
        ]
        set_options(groups, row)
        yield
        set_options(groups, before)

    def _meet(self, current: WorkPosition) -> None:
        """Push what has moved, once it is said with whom it is merged, and take what comes of it.

        Where it is rejected, others, or this group from newer values, do its work again.
        """
        self._take_back()
        lease, weight, updates = current.lease, self._weight, self._updates
        if self._is_equal:
            weight, updates = float(weight > 0), 1
        assert self._work is not None
        counts = weight, self.servers.push_bytes, self._loss, self._weight, updates
        merge = self._work.merge(Arrival(current.stream, lease.id, *counts))
        if self._inside.several and local_batchnorms(self.pair.model):
            average_statistics(self.pair.model, self._inside.group)
        starts, updates, examples = self._starts, self._updates, self._examples
        self.forget()
        if not merge.number:
            current.abandoned = True
            self.servers.release()
            return
        absent, finite = self.servers.fill(starts)
        if not finite:
            _spoil(current)
            self.pair.optimizer.state.clear()
        push = Push(
            keys=current.keys,
            pulled=0,
            weight=weight if finite else 0.0,
            examples=examples,
            absent=[],
            dropped=not finite,
            group=merge.number,
            parties=merge.parties,
            updates=updates,
            share=merge.share,
            staleness=merge.staleness,
        )
        self.servers.push(push, absent)
        current.first = current.step + 1
        if self.servers.result() in (Outcome.STALE, Outcome.EXPIRED):
            current.abandoned = True
        else:
            self.own.at = current.stream, lease.pass_, current.first


def _spoil(current: WorkPosition) -> None:
    """Take note of what is not finite."""
    lease = current.lease
    current.bad += 1
    current.detail = f"pass {lease.pass_}, step {current.step}, slice {lease.data_shard}"
