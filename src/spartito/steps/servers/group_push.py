"""A group that trains apart while a lease lasts, and then pushes what it has moved."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from spartito.collectives.collective import Collective
from spartito.data.batch import Batch
from spartito.engine.modules.batchnorm import average_statistics, local_batchnorms
from spartito.errors import TaskLostError
from spartito.outer.groups import EQUAL
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
from spartito.steps.servers.group_model import GroupModel
from spartito.steps.servers.group_state import OwnOptimizer
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


@dataclass(frozen=True, slots=True)
class Reduced:
    """The gradients of a group, summed and clipped: what is known of them.

    Args:
        weight: What they were divided by.
        loss: The sum of losses.
        is_finite: Whether they are numbers.
        stops: Whether a member asks for an end.
        brought: The sums of what all have brought beside that.
    """

    weight: float
    loss: float
    is_finite: bool
    stops: bool
    brought: Sequence[float]


class GroupStep(Protocol):
    """What a group does of an update of its own, by the strategy inside of it."""

    def again(self, batch: Batch) -> Any:
        """Compute the gradients of a batch once more."""
        ...

    def reduce_in_group(self, pair: Pair, brought: tuple[float, ...]) -> Reduced:
        """Sum the gradients of all members, and clip them; ``brought`` begins with the stops."""
        ...

    def update_in_group(self, pair: Pair) -> None:
        """Let the optimizer use them."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a group that trains apart, or the only one.

    Args:
        pair: What it trains.
        inside: The members.
        model: What they have of the model.
        replicas: Those who have other rows of a batch.
        step: What they do of an update.
    """

    pair: Pair
    inside: Inside
    model: GroupModel
    replicas: Collective
    step: GroupStep


class GroupPusher(Pusher):
    """Trains apart while a lease lasts, and then pushes what it has moved.

    ``work`` says with whom that is merged; ``timetable`` has the schedule's options. The members of
    a group do all of this together.
    """

    def __init__(
        self,
        member: Member,
        servers: Servers,
        rules: Rules,
        work: WorkSource | None,
        weights: str,
        timetable: Scheduled,
    ) -> None:
        super().__init__(member.pair, servers, rules, member.step.again)
        self._work, self._is_equal, self._timetable = work, weights == EQUAL, timetable
        self._member, self._inside = member, member.inside
        self.own: OwnOptimizer = OwnOptimizer(member.model, self.forget, rules.in_step)
        if work is not None:
            work.keep(self.own)
        self._step = 0  # of the schedule, as this lease began
        self._starts: list[Tensor] = []
        self._common: Row = []  # the options with which all members began
        self._updates = self._rows = self._examples = 0
        self._loss = self._weight = 0.0
        self._own: list[Tensor] = []  # aside, while the model shows the servers' values
        self._shown = Shown((), ())

    def ready(self, batch: Batch) -> None:
        """As `Pusher.ready`: the values that the group itself has, once it has begun."""
        self.check_learned()
        if self._starts:
            self._take_back()
        else:
            self.servers.admit()
            self._begin_alike()
            self._starts = self._copies()
            self.own.leased()
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
        """As `Pusher.look`; the group's own values come back with its next batch.

        What members have of a model between them stays.
        """
        if self._member.model.wholes:
            return
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

    def look_together(self) -> None:
        """As `Pusher.look_together`."""
        if self._member.model.wholes:
            self.servers.look_together()

    def _copies(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.servers.vector.tensors]

    def forget(self) -> None:
        """Begin anew from the servers' values."""
        self._starts, self._own = [], []
        self.own.forget()
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
        self._step = self._timetable.step
        if not inside.several:
            self.own.take(self.own.news)
            return

        def told() -> bytes:
            row = settings(optimizer)
            return msgspec.msgpack.encode((self._step, row, self.own.news))

        kind = tuple[int, Row, bytes]
        self._step, self._common, news = msgspec.msgpack.decode(inside.tell(told), type=kind)
        self.own.take(news)

    def _update(self, current: WorkPosition) -> tuple[float, float]:
        """An update of one's own; returns the loss and the weight in it."""
        pair, step = self.pair, self._member.step
        drawn = () if pair.randomness is None else pair.randomness.piggybacked()
        found = step.reduce_in_group(pair, (float(self.stops), float(self._rows), *drawn))
        rows, *others = found.brought
        if pair.randomness is not None:
            pair.randomness.check(others)
        weight, loss = found.weight, found.loss
        self.stops, self._rows, self._examples = found.stops, 0, self._examples + int(rows)
        if weight and found.is_finite:
            with self._options(self._step):
                step.update_in_group(pair)
            self._loss, self._weight = self._loss + loss, self._weight + weight
        elif weight:
            _spoil(current)
            weight = loss = 0.0
        self._updates += 1
        pair.gradients.clear()
        pair.passes = 0
        return loss, weight

    @contextmanager
    def _options(self, step: int) -> Generator[None]:
        """A block in which the optimizer has the schedule's options of this update.

        They begin at ``step``: that of the first member, as the lease began.
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
        replicas = self._member.replicas
        if replicas.world_size > 1 and local_batchnorms(self.pair.model):
            average_statistics(self.pair.model, replicas)
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
        self.own.merged()


def _spoil(current: WorkPosition) -> None:
    """Take note of what is not finite."""
    lease = current.lease
    current.bad += 1
    current.detail = f"pass {lease.pass_}, step {current.step}, slice {lease.data_shard}"
