"""What a chief must not forget: equal after the same events, which a `Journal` keeps.

The queues of work are pure, so their calls are events too. From time to time all that they led
to is written instead of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from msgspec import Struct, field

from spartito.decoders import msgpack_decoder
from spartito.errors import SpartitoError
from spartito.ps.protocol.messages import Lost
from spartito.ps.protocol.work import Lease, Merge
from spartito.ps.scheduler.journal import Journal, NoJournal
from spartito.ps.scheduler.plan import Plan
from spartito.ps.scheduler.progress import Numbers, QueueState
from spartito.ps.scheduler.queue import WorkQueue, WorkRange
from spartito.ps.scheduler.ranges import Ranges

LONGEST = 4 << 20
"""Bytes of events after which what they led to is written instead."""
LEASES, GROUPS = 1 << 32, 1 << 20
"""Leases and groups of each chief have numbers of their own: so many, or more."""
TOLD = 64
"""Of so many losses of workers servers are told that are started again."""

Note = Callable[[str, Sequence[Any]], None]
"""Is told of a call and its arguments."""


class NotedQueue(WorkQueue):
    """Tells ``note`` of each call that changed it."""

    def __init__(self, plan: Plan, groups: Numbers, note: Note) -> None:
        super().__init__(plan, groups)
        self._note, self._inside = note, False

    def join(self, worker: int) -> None:
        if worker not in self._live:
            super().join(worker)
            self._tell("join", worker)

    def drop(self, worker: int) -> list[Lease]:
        with self._whole("drop", worker):
            return super().drop(worker)

    def take(self, worker: int, epoch: int, now: float) -> Lease | None:
        before = len(self._live), len(self._waiting), len(self._held)
        outer, self._inside = self._inside, True
        found = super().take(worker, epoch, now)
        self._inside = outer
        if found is not None or before != (len(self._live), len(self._waiting), len(self._held)):
            self._tell("take", worker, epoch, now)
        return found

    def granted(self, worker: int) -> Lease | None:
        found = super().granted(worker)
        if found is not None:
            self._tell("granted", worker)
        return found

    def finish(
        self, lease: int, sums: Sequence[float], ended: int | None, now: float, metrics: bytes = b""
    ) -> bool:
        with self._whole("finish", lease, sums, ended, now, metrics):
            return super().finish(lease, sums, ended, now, metrics)

    def abandon(self, lease: int) -> bool:
        with self._whole("abandon", lease):
            return super().abandon(lease)

    def reopen(self, lost: Iterable[WorkRange]) -> int:
        ranges = list(lost)
        with self._whole("reopen", ranges):
            return super().reopen(ranges)

    def close(self, epoch: int) -> None:
        with self._whole("close", epoch):
            super().close(epoch)

    @contextmanager
    def _whole(self, what: str, *given: Any) -> Generator[None]:
        """A call that is noted when it is over, even by an error; those inside it are not."""
        outer, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = outer
            self._tell(what, *given)

    def _tell(self, what: str, *given: Any) -> None:
        if not self._inside:
            self._note(what, given)


CALLS = frozenset({"join", "drop", "take", "granted", "finish", "abandon", "reopen", "close"})


class Event(Struct, frozen=True, tag=True):
    """Something that a chief must not forget."""


class Opened(Event, frozen=True):
    """A stream of work begins."""

    stream: int
    plan: Plan


class Called(Event, frozen=True):
    """A call of a stream's queue."""

    stream: int
    what: str
    given: Sequence[Any]


class Stopped(Event, frozen=True):
    """No more work of a stream is given out."""

    stream: int


class Entered(Event, frozen=True):
    """A worker came, and got the number ``session``; 0: it left."""

    worker: int
    session: int


class Dropped(Event, frozen=True):
    """A worker has left out so many pushes more that were not finite."""

    worker: int
    pushes: int


class Gone(Event, frozen=True):
    """A worker is lost, and the servers are to be told."""

    lost: Lost


class Appointed(Event, frozen=True):
    """Who is the primary of a span in ``term``, and who its backup; -1: nobody."""

    span: int
    term: int
    primary: int
    backup: int


class Published(Event, frozen=True):
    """A value is there for all tasks."""

    key: int
    value: bytes


class Scheduled(Event, frozen=True):
    """The servers have this timetable."""

    timetable: bytes


class Met(Event, frozen=True):
    """What a server's process forgot, ``items`` work items, is leased again."""

    server: int
    incarnation: str
    items: int = 0


class Agreed(Event, frozen=True):
    """What becomes of what a worker has moved, which trains apart from the others."""

    worker: int
    stream: int
    lease: int
    merge: Merge


class Kept(Event, frozen=True):
    """Where the training is, for whoever goes on with it."""

    state: bytes


class Handed(Event, frozen=True):
    """Workers are to go on from these states."""

    states: dict[int, bytes]


class Taken(Event, frozen=True):
    """A worker has got its state."""

    worker: int


class Ended(Event, frozen=True):
    """The job is done."""


class Known(Struct):
    """A worker: its session, 0 once it left, the last one, and its pushes that were not finite."""

    session: int = 0
    last: int = 0
    bad: int = 0


class Ledger(Struct, tag=True):
    """All that events led to.

    ``job`` is the job's name, ``about`` says of which model it is and by which rules, ``reign``
    numbers the processes that were its chief.
    """

    job: str = ""
    about: str = ""
    reign: int = 0
    begun: bool = False
    workers: dict[int, Known] = field(default_factory=dict)
    sessions: int = 0
    queues: dict[int, WorkQueue] = field(default_factory=dict)
    groups: Numbers = field(default_factory=Numbers)
    stopped: set[int] = field(default_factory=set)
    values: dict[int, bytes] = field(default_factory=dict)
    timetable: bytes = b""
    servers: dict[int, str] = field(default_factory=dict)
    primaries: dict[int, Appointed] = field(default_factory=dict)
    lost_items: int = 0
    told: list[Lost] = field(default_factory=list)
    kept: bytes = b""
    ended: bool = False
    agreed: dict[int, Agreed] = field(default_factory=dict)
    states: dict[int, bytes] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Take note of what happened."""
        match event:
            case Opened(stream, plan):
                self.queues[stream] = WorkQueue(plan, self.groups)
            case Called(stream, what, given) if what in CALLS:
                with suppress(SpartitoError):  # it was told when it happened
                    getattr(self.queues[stream], what)(*given)
            case Stopped(stream):
                self.stopped.add(stream)
            case Entered(worker, session):
                known = self.workers.setdefault(worker, Known())
                known.session, known.last = session, max(session, known.last)
                self.sessions = max(self.sessions, session)
            case Dropped(worker, pushes):
                self.workers.setdefault(worker, Known()).bad += pushes
            case Gone(lost):
                self.told = [*self.told, lost][-TOLD:]
            case Published(key, value):
                self.values[key] = value
            case Scheduled(timetable):
                self.timetable = timetable
            case Appointed(span):
                self.primaries[span] = event
            case Met(server, incarnation, items):
                self.servers[server] = incarnation
                self.lost_items += items
            case Agreed(worker):
                self.agreed[worker] = event
                number = event.merge.number
                self.groups.upcoming = max(self.groups.upcoming, number + 1)
            case Handed(states):
                self.states = dict(states)
            case Taken(worker):
                self.states.pop(worker, None)
            case Kept(state):
                self.kept = state
            case Ended():
                self.ended = True


_Record = (
    Ledger | Opened | Called | Stopped | Entered | Dropped | Gone | Published | Scheduled | Met
    | Appointed | Agreed | Handed | Taken | Kept | Ended
)  # fmt: skip


def loss(worker: int, lease: Lease | None) -> Lost:
    """What servers are told of a worker that is lost, with a lease or without."""
    return Lost(worker, lease.group, lease.stop - lease.start) if lease else Lost(worker, 0, 0)


class Book:
    """A `Ledger` and the journal in which it is kept. Whoever writes into it holds one lock.

    It begins with what another process has written there of a job ``about`` the same; else ``job``
    is the name of a new one.
    """

    def __init__(self, job: str, journal: Journal | None = None, about: str = "") -> None:
        self._journal: Journal = NoJournal() if journal is None else journal
        found = _replayed(self._journal.read())
        self.goes_on = found is not None and found.begun and found.about == about
        """Whether another process was the chief of this job before."""
        ledger = self.ledger = found if found and self.goes_on else Ledger(job, about)
        ledger.reign = 1 if found is None else found.reign + 1
        self._most = LONGEST
        if self.goes_on:  # the one before may have given out more, if it was frozen
            ledger.groups.upcoming = max(ledger.groups.upcoming, ledger.reign * GROUPS)
        for stream, queue in ledger.queues.items():
            state = queue.dump()
            state.ids = max(state.ids, ledger.reign * LEASES) if self.goes_on else state.ids
            ledger.queues[stream] = self._noted(stream, state)
        if self.keeps:
            self._rewrite()  # at once: no two chiefs have the same number

    @property
    def keeps(self) -> bool:
        """Whether another process could go on."""
        return not isinstance(self._journal, NoJournal)

    def begin(self) -> None:
        """The job has begun: from now on another process could go on."""
        self.ledger.begun = True
        if self.keeps:
            self._rewrite()

    def open(self, stream: int, plan: Plan) -> WorkQueue:
        """The queue of a new stream."""
        empty = WorkQueue(plan).dump()
        self._append(Opened(stream, plan))
        queue = self.ledger.queues[stream] = self._noted(stream, empty)
        return queue

    def note(self, event: Event) -> None:
        """Take note of what happened, before anybody hears of it."""
        self.ledger.apply(event)
        self._append(event)

    def remove(self) -> None:
        """Nobody goes on with this job."""
        self._journal.remove()

    def _noted(self, stream: int, state: QueueState) -> NotedQueue:
        note: Note = lambda what, given: self._append(Called(stream, what, given))  # noqa: E731
        return NotedQueue.load(state, self.ledger.groups, note)

    def _append(self, event: Event) -> None:
        if self.keeps:
            self._journal.append(_encode(event))
            if isinstance(event, Kept) or self._journal.size > self._most:
                self._rewrite()

    def _rewrite(self) -> None:
        whole = _encode(self.ledger)
        self._journal.rewrite(whole)
        self._most = max(LONGEST, len(whole))


def _replayed(records: Sequence[bytes]) -> Ledger | None:
    """What the records led to; None where there are none."""
    if not records:
        return None
    msgpack_decoder(QueueState, _decoded)  # before it is converted to
    decode = msgpack_decoder(_Record, _decoded).decode
    ledger = decode(records[0])
    if not isinstance(ledger, Ledger):
        return None
    for queue in ledger.queues.values():
        queue._groups = ledger.groups
    for record in records[1:]:
        event = decode(record)
        if isinstance(event, Event):
            ledger.apply(event)
    return ledger


def _encode(value: Any) -> bytes:
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, WorkQueue):
        return value.dump()
    if isinstance(value, Ranges):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} in a journal")


def _decoded(kind: type, value: Any) -> Any:
    if kind is Ranges:
        made = Ranges()
        for start, stop in value:
            made.add(start, stop)
        return made
    state = msgspec.convert(value, QueueState, dec_hook=_decoded)
    return WorkQueue.load(state, Numbers())
