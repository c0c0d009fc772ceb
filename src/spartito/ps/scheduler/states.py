"""What groups that train apart keep to themselves: brought together, and given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from spartito.ps.protocol.runtime import Condition, Runtime
from spartito.ps.protocol.work import PART, At, Given
from spartito.ps.scheduler.ledger import Book, Handed, Taken
from spartito.ps.scheduler.members import Member

LOOK_SECONDS = 0.25
"""How often who waits for states looks whether somebody is missing."""


@dataclass(slots=True)
class Own:
    """The state of a group, and where it was: as far as all others, if they met there."""

    at: At
    state: bytes


@dataclass(slots=True)
class Coming:
    """A state of which the first parts are here."""

    own: At
    parts: list[bytes] = field(default_factory=list)


class States:
    """The states of groups, by worker. ``changed`` is the coordinator's lock.

    A state holds until its worker gets other work, or what it has moved is merged. What workers
    are to go on from is in the ``book``: another process may be the chief when one asks for it.
    """

    def __init__(
        self, members: Sequence[Member], changed: Condition, runtime: Runtime, book: Book
    ) -> None:
        self._members, self._changed, self._runtime = members, changed, runtime
        self._book = book
        self._given: dict[int, Own] = {}
        self._coming: dict[int, Coming] = {}
        self._sent: set[int] = set()  # to these all of it was sent, which may not have come
        self.collecting = False
        """Nothing is merged meanwhile."""

    # Workers

    def wants(self, worker: int) -> bool:
        """Whether ``worker`` is to give its state. Called with the lock held."""
        return self.collecting and worker not in self._given

    def asks(self, worker: int) -> bool:
        """As `wants`, without the lock."""
        with self._changed:
            return self.wants(worker)

    def take(self, worker: int, given: Given, part: bytes) -> None:
        """A part of the state of ``worker``."""
        with self._changed:
            coming = self._coming.get(worker)
            if given.first or coming is None:
                coming = self._coming[worker] = Coming(given.at)
            coming.parts.append(part)
            if given.last:
                self._given[worker] = Own(coming.own, b"".join(coming.parts))
                del self._coming[worker]
                self._changed.notify_all()

    def forget(self, worker: int) -> None:
        """``worker`` goes on. Called with the lock held."""
        self._given.pop(worker, None)

    def enter(self, worker: int) -> None:
        """``worker`` is another process than before, which has got nothing yet."""
        with self._changed:
            self._sent.discard(worker)

    def heard(self, worker: int) -> None:
        """``worker`` asks for work: what was sent to it has come."""
        with self._changed:
            if worker in self._sent:
                self._sent.remove(worker)
                self._book.note(Taken(worker))

    def keeps(self, worker: int) -> bool:
        """Whether there is a state that ``worker`` is to go on from."""
        with self._changed:
            return worker in self._book.ledger.states

    def part(self, worker: int, begin: int) -> tuple[bytes, bool]:
        """A part of what `keeps` told of, and whether it is the last one.

        It can be asked for again, as the reply may be lost, until ``worker`` asks for work.
        """
        with self._changed:
            whole = self._book.ledger.states.get(worker, b"")
            is_last = begin + PART >= len(whole)
            if is_last and whole:
                self._sent.add(worker)
            return whole[begin : begin + PART], is_last

    # The chief

    def keep(self, states: Mapping[int, bytes]) -> None:
        """Have workers go on from these."""
        with self._changed:
            self._given.clear()
            self._sent.clear()
            self._book.note(Handed(dict(states)))

    @contextmanager
    def collected(self, seconds: float, check: Callable[[], None]) -> Iterator[dict[int, Own]]:
        """The states of all workers that give theirs in time, but the chief's own.

        Nothing is merged as long as the block lasts. Raises what ``check`` does.
        """
        with self._changed:
            self.collecting = True
            self._changed.notify_all()
        try:
            yield self._gathered(seconds, check)
        finally:
            with self._changed:
                self.collecting = False
                self._given.clear()
                self._changed.notify_all()

    def _gathered(self, seconds: float, check: Callable[[], None]) -> dict[int, Own]:
        end = self._runtime.now() + seconds
        with self._changed:
            while any(
                member.live and not member.local and self.wants(worker)
                for worker, member in enumerate(self._members)
            ):
                check()
                left = end - self._runtime.now()
                if left <= 0:
                    break
                self._changed.wait(min(left, LOOK_SECONDS))
            return dict(self._given)
