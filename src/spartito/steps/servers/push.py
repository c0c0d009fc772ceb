"""One model's gradients on their way to the servers, and the values on their way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from spartito.data.batch import Batch
from spartito.engine.gradients.gradient_sum import LocalGradients
from spartito.errors import UserError
from spartito.ps.client.servers import Servers
from spartito.ps.protocol.messages import Outcome, Push
from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.work import Lease
from spartito.steps.prepared import Pair
from spartito.steps.servers.group_state import OwnOptimizer

SOON = 0.05
"""Seconds after which a push waits for those of others, and not for the servers."""


class ServedGradients(LocalGradients):
    """Those of a worker, of parameters whose offsets on the servers were laid out once."""

    _planned = False

    def _plan(self) -> None:
        if self._planned:
            raise other_parameters()
        self._planned = True
        super()._plan()


def other_parameters() -> UserError:
    """What is said of a model that learns other parameters than the servers have."""
    return UserError(
        "the optimizer's parameters changed, or others learn now, under parameter_server",
        "The servers hold what learned at the start: make a new Trainer, in a new job, or "
        "choose a synchronous strategy.",
    )


class WorkPosition:
    """The work item that is computed now: where it is in its lease."""

    def __init__(self, stream: int, lease: Lease) -> None:
        self.stream, self.lease = stream, lease
        self.step = lease.start
        self.first = lease.start  # of the work items that the next push covers
        self.reached = lease.start  # of those that the last push covers
        self.bad = 0
        self.detail = ""
        self.abandoned = False

    @property
    def is_last(self) -> bool:
        """Whether the lease ends with this work item."""
        return self.step + 1 == self.lease.stop

    @property
    def keys(self) -> list[tuple[int, int, int, int]]:
        """The work items since the last push, as a push is keyed."""
        lease = self.lease
        if self.first == self.step:  # as most pushes are
            return [(self.stream, lease.pass_, self.step, lease.data_shard)]
        return [
            (self.stream, lease.pass_, step, lease.data_shard)
            for step in range(self.first, self.step + 1)
        ]


class Pusher:
    """Pushes what a task computes, one work item of its leases after the other.

    ``servers`` take the gradients; ``compute`` computes the gradients of a batch again,
    when the first ones came too late.
    """

    def __init__(
        self, pair: Pair, servers: Servers, rules: Rules, compute: Callable[[Batch], Any]
    ) -> None:
        self.pair, self.servers = pair, servers
        self.stops = False
        """Whether this task asks for an end; in a group each member knows since an update."""
        self.current: WorkPosition | None = None
        """Which work item is computed now."""
        self.repeats = True
        """Whether `compute` can do what was done: not so in loops that users write."""
        self.idle: Callable[[], None] = lambda: None
        """Is called while a push waits for those of others."""
        self.computed: Batch | None = None
        """The last one of which a loop of the user's own has computed gradients."""
        self.own: OwnOptimizer | None = None
        """Of a group that trains apart: what it keeps to itself."""
        self._rules, self._compute = rules, compute
        self._batches: list[Batch] = []  # of the next push, or of the last one that was sent
        self._sent: Push | None = None

    @property
    def _here(self) -> WorkPosition:
        if self.current is None:
            raise UserError(
                "an update outside of the batches that the chief gave out",
                "Iterate over strategy.distribute(data), and update once for each batch.",
            )
        return self.current

    def check_learned(self) -> None:
        """Refuse other parameters than those that the servers have; each task finds them alone."""
        if self.pair.gradients.changed:
            raise other_parameters()

    def ready(self, batch: Batch) -> None:
        """Have values to compute with before the forward pass of ``batch``."""
        self.arrive()
        self.servers.admit()
        if not self.pair.passes:
            self._batches = []
        self._batches.append(batch)

    def push(self) -> tuple[float, float]:
        """Send the gradients that wait; returns the loss and the weight in them.

        The reply is awaited when the values are needed.
        """
        current = self._here
        lease, current.reached = current.lease, current.first
        self._sent = Push(
            keys=current.keys,
            pulled=0,
            weight=0.0,
            examples=sum(batch.size for batch in self._batches),
            absent=[],
            group=lease.group,
            index=current.first - lease.start,
            parties=lease.parties(current.first - lease.start) if lease.group else 0,
        )
        found = self._send(self._sent, current)
        current.first = current.step + 1
        if self._rules.together:  # nobody goes on before all have come
            if not self.servers.came(SOON):
                self.idle()
            self.arrive()
        return found

    def arrive(self) -> None:
        """Await the reply to the last push, and compute again if it was too stale."""
        outcome = self.servers.result()
        while outcome is Outcome.STALE and self.repeats and self._sent and self.current:
            self.servers.admit()
            for batch in self._batches:
                self._compute(batch)
            self._send(self._sent, self.current)
            outcome = self.servers.result()
        if outcome in (Outcome.STALE, Outcome.EXPIRED) and self.current is not None:
            self.current.abandoned = True  # others, or we ourselves, compute the lease again

    def settle(self) -> None:
        """Have everything pushed, and all replies here."""
        if self.pair.passes:
            self.check_updated()
            self.push()
        self.arrive()

    def check_updated(self) -> None:
        """Refuse gradients in a loop of the user's own that wait for a batch after theirs.

        Which one comes next here, and whether one does, depends on what other workers take.

        Raises:
            UserError: There are some.
        """
        gradients = self.pair.gradients
        waits = gradients.backward_calls and any(p.grad is not None for p in gradients.parameters)
        if waits and not self.repeats and self.pair.accumulate == 1:
            raise UserError(
                "backward() without update() for a batch under parameter_server: workers get "
                "batches one by one, and not always two in a row",
                "For an update of n batches write strategy.prepare(..., accumulate=n), and call "
                "update() after each.",
            )

    def leave(self) -> None:
        """Give up what was not pushed."""
        self.arrive()
        self.pair.gradients.clear()
        self.pair.passes = 0
        self.servers.release()

    def look(self) -> None:
        """The newest values into the model."""
        self.arrive()
        self.servers.look()

    def look_together(self) -> None:
        """The newest values, where the members of a group have a model between them."""

    def show(self) -> None:
        """The values in the model are the servers' own, until the next batch."""

    def _send(self, push: Push, current: WorkPosition) -> tuple[float, float]:
        pair = self.pair
        weight, loss = map(float, pair.gradients.reduce()[:2])
        if weight and pair.clip_norm is not None:
            pair.gradients.clip(pair.clip_norm, pair.gradients.norm())
        absent, finite = self.servers.fill()
        if not finite:
            current.bad += 1
            current.detail = (
                f"pass {current.lease.pass_}, step {current.step}, slice {current.lease.data_shard}"
            )
            weight = loss = 0.0
        nothing = not weight and not push.group
        self.servers.push(replace(push, weight=weight, dropped=not finite or nothing), absent)
        pair.gradients.clear()
        pair.passes = 0
        return loss, weight
