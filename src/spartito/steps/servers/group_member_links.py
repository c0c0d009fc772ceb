"""How a member of a group reaches coordinator and servers: by the first one, who tells the others.

They stand where a worker by itself has its own links, so that both do the same with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from torch import Tensor

from spartito.collectives.collective import Collective, Traffic
from spartito.ps.chief import Chief
from spartito.ps.client.servers import Servers
from spartito.ps.job import Job
from spartito.ps.protocol.messages import Outcome, Push, Values
from spartito.ps.protocol.work import (
    Arrival,
    Complete,
    Merge,
    OwnState,
    Reached,
    Report,
    Work,
    WorkSource,
)
from spartito.steps.servers.group_member import Inside
from spartito.steps.servers.group_model import GroupModel


class _Given(msgspec.Struct, frozen=True):
    """What a question for work has brought."""

    work: Work
    timetable: bytes


class _Became(msgspec.Struct, frozen=True):
    """What became of a push, and how far the servers are."""

    outcome: Outcome | None
    progress: Values


class GroupWork(WorkSource):
    """The work of a group: its first member asks ``source`` for it, which the others do not have.

    What members have of the metrics is put together before a report, by those of ``rows``: one
    for each part of a batch.
    """

    def __init__(self, inside: Inside, rows: Collective, source: WorkSource | None) -> None:
        self._inside, self._rows, self._source = inside, rows, source
        self._timetable = b""
        self._metrics: list[bytes] | None = None  # of the present lease, of all members

    @property
    def generation(self) -> int:
        return 0 if self._source is None else self._source.generation

    @property
    def timetable(self) -> bytes:
        return self._timetable

    def take(self, stream: int, epoch: int, report: Report | None, wait: bool = True) -> Work:
        if epoch < 0:  # a lease is given up: each member does so by itself
            self._metrics = None
            if self._source is not None:
                return self._source.take(stream, epoch, report, wait)
            return Complete(epoch)
        if report is not None:  # also without any here: another member may have some
            metrics, self._metrics = self.metrics(report.metrics), None
            report = msgspec.structs.replace(report, metrics=msgspec.msgpack.encode(metrics))

        def ask() -> bytes:
            assert self._source is not None
            work = self._source.take(stream, epoch, report, wait)
            return msgspec.msgpack.encode(_Given(work, self._source.timetable))

        found = msgspec.msgpack.decode(self._inside.tell(ask), type=_Given)
        self._timetable = found.timetable
        return found.work

    def metrics(self, own: bytes) -> list[bytes]:
        """The metrics of the present lease, of all members.

        The first one may ask before the others are through with it: they come when they report.

        Args:
            own: This member's.
        """
        if self._metrics is None:
            self._metrics = self._rows.all_gather_bytes(own)
        return self._metrics

    def merge(self, arrival: Arrival) -> Merge:
        def ask() -> bytes:
            assert self._source is not None
            return msgspec.msgpack.encode(self._source.merge(arrival))

        return msgspec.msgpack.decode(self._inside.tell(ask), type=Merge)

    def reach(self, reached: Reached, metrics: bytes) -> None:
        if self._source is not None:
            self._source.reach(reached, metrics)

    def keep(self, own: OwnState) -> None:
        if self._source is not None:
            self._source.keep(own)

    def give(self) -> None:
        if self._source is not None:
            self._source.give()

    def published(self, key: int) -> bytes:
        def ask() -> bytes:
            assert self._source is not None
            return self._source.published(key)

        return self._inside.tell(ask)

    def fail(self, what: str) -> None:
        if self._source is not None:
            self._source.fail(what)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


class GroupServers(Servers):
    """The servers for a group: its first member pushes, and has the values that all begin with.

    The others have connections to look at the values alone; none, where members have parts of
    these.
    """

    def __init__(self, inside: Inside, model: GroupModel, *args: Any) -> None:
        super().__init__(*args)
        self._inside, self._model = inside, model

    @property
    def traffic(self) -> Traffic:
        """With what went from member to member."""
        found, here = super().traffic, self._inside.group.traffic
        return Traffic(
            found.sent + here.sent, found.received + here.received, found.waited + here.waited
        )

    def admit(self) -> None:
        def ask() -> bytes:
            Servers.admit(self)
            return msgspec.msgpack.encode(self.progress)

        self.progress = msgspec.msgpack.decode(self._inside.tell(ask), type=Values)
        self._model.spread()
        self._admitted = True

    def look(self) -> None:
        if self.links:
            super().look()

    def look_together(self) -> None:
        """Have the newest values in what all members have; all of them call it."""

        def ask() -> bytes:
            Servers.look(self)
            return b""

        self._inside.tell(ask)
        self._model.spread()

    def fill(self, starts: Sequence[Tensor] | None = None) -> tuple[list[list[int]], bool]:
        self._model.collect()
        absent, finite = super().fill(starts) if self._inside.is_first else ([], True)
        return absent, self._inside.agree(finite)

    def push(self, push: Push, absent: Sequence[Sequence[int]]) -> None:
        if self._inside.is_first:
            super().push(push, absent)

    def result(self) -> Outcome | None:
        def ask() -> bytes:
            outcome = Servers.result(self)
            return msgspec.msgpack.encode(_Became(outcome, self.progress))

        found = msgspec.msgpack.decode(self._inside.tell(ask), type=_Became)
        self.progress = found.progress
        return found.outcome


def joined(
    job: Job,
    chief: Chief | None,
    inside: Inside,
    model: GroupModel,
    rows: Collective | None,
) -> tuple[WorkSource | None, Servers]:
    """The work of a task of a job that has begun, and its connections to the servers.

    Args:
        job: What it is of.
        chief: If this task is it.
        inside: One's own group.
        model: What it has of the model.
        rows: Those of it with other rows of a batch; None: this task is in no group, of a job
            some of whose groups have several members.

    Returns:
        The work is None where it computes nothing.
    """
    found: list[WorkSource | None] = []

    def ask() -> bytes:
        source, name = job.work(chief)
        found.append(source)
        return name.encode()

    name = inside.tell(ask).decode()
    source = found[0] if found else None
    if rows is None:
        return source, job.connect(name, source)
    work, kind = GroupWork(inside, rows, source), partial(GroupServers, inside, model)
    sees = inside.is_first or not model.wholes
    return work, job.connect(name, source, kind) if sees else job.without_servers(kind)
