"""The work of a task that is in the chief's own process."""

from __future__ import annotations

from spartito.errors import TaskLostError
from spartito.ps.protocol.work import (
    Arrival,
    Merge,
    OwnState,
    Pause,
    Reached,
    Report,
    Work,
    WorkSource,
)
from spartito.ps.scheduler.coordinator import Coordinator
from spartito.ps.scheduler.meetings import LOOK_SECONDS


class LocalLink(WorkSource):
    """The work of a task that is in the chief's own process."""

    def __init__(self, coordinator: Coordinator, worker: int) -> None:
        self._coordinator, self._worker = coordinator, worker
        self._session = coordinator.enter(worker, local=True)

    @property
    def generation(self) -> int:
        return self._session

    @property
    def timetable(self) -> bytes:
        return self._coordinator.timetable

    def take(self, stream: int, epoch: int, report: Report | None, wait: bool = True) -> Work:
        """As `WorkSource.take`; raises too what the coordinator found to be wrong."""
        began = self._coordinator.runtime.now()
        while True:
            work = self._coordinator.take(
                self._worker, stream, epoch, report, wait, patience=LOOK_SECONDS
            )
            self._coordinator.check(began)
            if not wait or not isinstance(work, Pause):
                return work
            report = None

    def reach(self, reached: Reached, metrics: bytes) -> None:
        """Nothing: the chief knows what it has done itself."""

    def merge(self, arrival: Arrival) -> Merge:
        """As `WorkSource.merge`; raises too what the coordinator found to be wrong."""
        began = self._coordinator.runtime.now()
        while True:
            found = self._coordinator.meetings.ask(self._worker, arrival, LOOK_SECONDS)
            self._coordinator.check(began)
            if found is not None:
                return found

    def keep(self, own: OwnState) -> None:
        """Nothing: the chief has its own."""

    def give(self) -> None:
        """Nothing: the chief has its own."""

    def published(self, key: int) -> bytes:
        value = self._coordinator.key_values.published(key, self._coordinator.timeout)
        if value is None:
            raise TaskLostError(f"the chief published nothing under {key}")
        return value

    def fail(self, what: str) -> None:
        """Nothing: the chief's own exception ends it."""

    def close(self) -> None:
        self._coordinator.leave(self._worker, self._session, lost=False)
