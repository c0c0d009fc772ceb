"""The chief's links to all servers, for what is not about gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from spartito.errors import SpartitoError, TaskLostError
from spartito.ps.client.link import Link, Restarted
from spartito.ps.protocol.keys import Keys
from spartito.ps.protocol.messages import End, Fence, Load, Lost, Message, Status
from spartito.ps.protocol.runtime import SYSTEM, Runtime
from spartito.ps.protocol.slots import State as OptimizerState
from spartito.ps.protocol.timetable import Timetable

T = TypeVar("T")


class Control:
    """The chief's own links to the servers, for what is not about gradients; thread-safe.

    Without ``scheduled`` the servers' optimizer is not the one that has a timetable.
    """

    def __init__(
        self, links: Sequence[Link], runtime: Runtime = SYSTEM, scheduled: bool = True
    ) -> None:
        self.links = list(links)
        self._scheduled, self._now = scheduled, runtime.now
        self._lock = runtime.lock()
        self.used = self._now()
        """When the servers were last asked for anything but how far they are."""
        self._lost: deque[Lost] = deque(maxlen=64)
        self._generations: dict[int, int] = {}
        self.timetable = b""
        """The last one that was sent, encoded."""
        self.restarted: set[int] = set()
        self.loaded: set[int] = set()
        """The servers that were given their values."""

    def go_on(self, timetable: bytes, sessions: Mapping[int, int], told: Sequence[Lost]) -> None:
        """Tell the servers again what a chief before this one told them."""
        with self._lock:
            self.timetable, self._generations = timetable, dict(sessions)
            self._lost.extend(told)
            if timetable and self._scheduled:
                self._all(Link.schedule, timetable)
            for message in (*told, Fence(self._generations)):
                self._all(Link.ask, message)

    def tell(self, message: Message) -> list[Any]:
        """Ask every server the same; returns in their order."""
        with self._lock:
            found = self._all(Link.ask, message)
            if not isinstance(message, Status):
                self.used = self._now()
            return found

    def lose(self, lost: Lost) -> None:
        """Tell the servers that a worker is lost; those that are restarted later are told again."""
        with self._lock:
            self._lost.append(lost)
            self._all(Link.ask, lost)

    def fence(self, worker: int, generation: int) -> None:
        """Have the servers refuse every process of a worker that is older than this one."""
        with self._lock:
            self._generations[worker] = max(generation, self._generations.get(worker, 0))
            self._all(Link.ask, Fence(self._generations))

    def applied(self, number: int, data_shards: int) -> Keys:
        """Which work items a server has applied."""
        with self._lock:
            return self._insist(number, Link.applied, data_shards)

    def load(self, job: str, values: Sequence[Tensor], states: Sequence[OptimizerState],
             settings: list[dict[str, Any]]) -> None:  # fmt: skip
        """Give every server its values and the state of its optimizer."""
        with self._lock:
            self.timetable = b""
            for number, (own, state) in enumerate(zip(values, states, strict=True)):
                load = Load(job, settings, len(state))
                self._insist(number, Link.load, load, own, state)
                self.loaded.add(number)

    def schedule(self, timetable: Timetable) -> None:
        """Send every server the optimizer's options, also one that is restarted later."""
        with self._lock:
            self.timetable = msgspec.msgpack.encode(timetable)
            if self._scheduled:
                self._all(Link.schedule, self.timetable)

    def states(self) -> list[tuple[Tensor, OptimizerState, list[dict[str, Any]]]]:
        """Every server's values, the state of its optimizer, and its options."""
        with self._lock:
            found = self._all(Link.state)
            self.used = self._now()
            return found

    def end(self, error: TaskLostError | None = None) -> list[SpartitoError]:
        """Tell every server that the job has ended; returns why some could not be reached.

        Args:
            error: Why it did before its training was done: what servers, and later calls, raise.
        """
        failed = []
        with self._lock:
            for number, link in enumerate(self.links):
                if link.is_closed:  # what it was lost by was raised before
                    continue
                try:
                    self._insist(number, Link.ask, End(str(error or "")))
                except SpartitoError as lost:
                    failed.append(lost)
                if error is not None:
                    link.end(error)
        return failed

    def close(self) -> None:
        """Close the connections to all."""
        with self._lock:
            for link in self.links:
                link.close()

    def _all(self, ask: Callable[..., T], *what: Any) -> list[T]:
        return [self._insist(number, ask, *what) for number in range(len(self.links))]

    def _insist(self, number: int, ask: Callable[..., T], *what: Any) -> T:
        """The result of ``ask`` for a server, however often that is restarted meanwhile."""
        link, forgetful = self.links[number], False
        while True:
            try:
                if forgetful and self.timetable and self._scheduled:
                    link.schedule(self.timetable)
                for told in (*self._lost, Fence(self._generations)) if forgetful else ():
                    link.ask(told)
                return ask(link, *what)
            except Restarted:
                self.restarted.add(number)
                forgetful = True
