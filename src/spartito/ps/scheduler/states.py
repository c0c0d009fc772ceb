"""What groups that train apart keep to themselves: brought together, and given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from spartito.ps.protocol.runtime import Condition, Runtime
from spartito.ps.protocol.work import PART, At, Given
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

    A state holds until its worker gets other work, or what it has moved is merged.
    """

    def __init__(self, members: Sequence[Member], changed: Condition, runtime: Runtime) -> None:
        self._members, self._changed, self._runtime = members, changed, runtime
        self._given: dict[int, Own] = {}
        self._coming: dict[int, Coming] = {}
        self._kept: dict[int, bytes] = {}
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

    def keeps(self, worker: int) -> bool:
        """Whether there is a state that ``worker`` is to go on from."""
        with self._changed:
            return worker in self._kept

    def part(self, worker: int, begin: int) -> tuple[bytes, bool]:
        """A part of what `keeps` told of, and whether it is the last one: then it is gone."""
        with self._changed:
            whole = self._kept.get(worker, b"")
            if begin + PART >= len(whole):
                self._kept.pop(worker, None)
            return whole[begin : begin + PART], begin + PART >= len(whole)

    # The chief

    def keep(self, states: Mapping[int, bytes]) -> None:
        """Have workers go on from these."""
        with self._changed:
            self._given.clear()
            self._kept = dict(states)

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
