"""The meetings of groups that train apart, in the chief's process; thread-safe."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.runtime import Condition, Runtime
from spartito.ps.protocol.work import REJECTED, Arrival, Lease, Merge
from spartito.ps.scheduler.gathering import Done, Gathering
from spartito.ps.scheduler.ledger import Agreed, Book
from spartito.ps.scheduler.members import Member
from spartito.ps.scheduler.states import States

LOOK_SECONDS = 0.25
"""How often who waits, and the watch, look whether somebody is missing."""


class Meetings:
    """Tells each group that has come with whom it is merged.

    ``rules`` say how pushes become updates, ``changed`` is the coordinator's lock; it is held
    where a method says so.
    """

    def __init__(
        self,
        rules: Rules | None,
        book: Book,
        members: Sequence[Member],
        changed: Condition,
        runtime: Runtime,
    ) -> None:
        rules = rules or Rules(len(members))
        self.updates = max(1, rules.every)
        """How many a worker makes before it pushes what came of them."""
        self._gathering = Gathering(
            rules.quorum, rules.grace, rules.max_staleness, book.ledger.groups
        )
        self._grace, self._book, self._queues = rules.grace, book, book.ledger.queues
        self._members, self._changed, self._runtime = members, changed, runtime
        self.states = States(members, changed, runtime, book)
        """What groups keep to themselves."""

    def ask(self, worker: int, arrival: Arrival, patience: float) -> Merge | None:
        """What becomes of what ``worker`` has moved; None after ``patience`` seconds."""
        with self._changed:
            end = self._runtime.now() + patience
            while True:
                if known := self._agreed(worker, arrival.stream, arrival.lease):
                    return known.merge
                if not self._holds(worker, arrival):
                    return REJECTED  # it was given up meanwhile: others have its work
                self._gathering.arrive(worker, arrival, self._runtime.now())
                self._decide(arrival)
                left = end - self._runtime.now()
                if not self._gathering.waits(worker):
                    continue
                if left <= 0 or self.states.wants(worker):
                    return None
                self._changed.wait(min(left, LOOK_SECONDS, self._grace or LOOK_SECONDS))

    def begin(self, worker: int) -> None:
        """``worker`` has got a lease. Called with the lock held."""
        self.states.forget(worker)
        self._gathering.begin(worker)

    def leave(self, worker: int) -> None:
        """``worker`` is lost. Called with the lock held."""
        self._gathering.leave(worker)

    def joined(self, worker: int, stream: int, lease: Lease) -> Lease:
        """``lease`` as the servers know it, if ``worker`` was to push what it has moved."""
        known = self._agreed(worker, stream, lease.id)
        number = known.merge.number if known else 0
        return replace(lease, group=number) if number else lease

    def take(self) -> dict[int, Done]:
        """What was done of each group since the last call."""
        with self._changed:
            return self._gathering.take()

    def staleness(self) -> dict[str, int]:
        """How many differences were so many merges old."""
        with self._changed:
            return {str(age): count for age, count in sorted(self._gathering.staleness.items())}

    def _holds(self, worker: int, arrival: Arrival) -> bool:
        queue = self._queues.get(arrival.stream)
        held = queue.held() if queue is not None else []
        return any((who, lease.id) == (worker, arrival.lease) for who, lease in held)

    def _decide(self, arrival: Arrival) -> None:
        if self.states.collecting:
            return
        ledger, queue = self._book.ledger, self._queues[arrival.stream]
        held = dict(queue.held())
        live = {index for index, member in enumerate(self._members) if member.live}
        out = [who for who in held if not self._gathering.waits(who)]
        # They push what they have moved.
        done = {who for who in out if self._agreed(who, arrival.stream, held[who].id)}
        away = [who for who in out if who not in done]
        epoch = min(lease.epoch for lease in held.values())
        over = arrival.stream in ledger.stopped or ledger.ended
        free = 0 if over else min(len(live - held.keys() | done), queue.spare(epoch))
        for merged in self._gathering.decide(self._runtime.now(), away, free, live):
            for worker, (came, merge) in merged.items():
                self.states.forget(worker)
                self._book.note(Agreed(worker, came.stream, came.lease, merge))
            self._changed.notify_all()

    def _agreed(self, worker: int, stream: int, lease: int) -> Agreed | None:
        """What becomes of a lease of ``worker``, if that is decided; each stream has a number 1."""
        known = self._book.ledger.agreed.get(worker)
        return known if known and (known.stream, known.lease) == (stream, lease) else None
