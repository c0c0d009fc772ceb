"""The coordinator of a job with parameter servers, in the chief's process: gives out all work.

Thread-safe: the chief calls it, and so does the thread of every worker's connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from spartito.errors import SpartitoError, UserError
from spartito.notes import note, shown, warn
from spartito.ps.protocol.rules import Rules
from spartito.ps.protocol.runtime import SYSTEM, Runtime
from spartito.ps.protocol.work import Complete, Lease, Pause, Report, Work
from spartito.ps.scheduler import ledger
from spartito.ps.scheduler.key_values import KeyValues
from spartito.ps.scheduler.meetings import LOOK_SECONDS, Meetings
from spartito.ps.scheduler.members import absence, absent, members, other_order, raised, spoiled
from spartito.ps.scheduler.plan import Plan
from spartito.ps.scheduler.queue import WorkQueue, WorkRange
from spartito.ps.scheduler.readings import Readings

REPLY_SECONDS = 1.0
"""The longest that a worker's request waits for its reply."""
PATIENCE = 3
"""So many time limits may go by while workers take work and finish none."""
NOTE_SECONDS = 2.0
"""How long the chief waits for workers before it says so."""
LEAVE_SECONDS = 5.0
"""How long `Coordinator.close` waits for the workers to leave."""


class Coordinator(Readings):
    """Who computes what, over all streams of a job.

    names          of the workers, by index
    lease_seconds  a worker that is silent so long is lost; it may come back
    timeout        seconds that the chief waits without any progress before it gives up
    on_lost        is told (worker, lease) of each lease of a lost worker, or (worker, None)
    on_came        is told (worker, session) before a worker hears that it may come in
    expect_all     nothing is given out until every worker has come
    bad_limit      how many pushes may be dropped because they were not finite
    book           what another process knew that was the chief before, and where that is kept
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        lease_seconds: float = 10.0,
        timeout: float = 300.0,
        on_lost: Callable[[int, Lease | None], None] = lambda worker, lease: None,
        on_came: Callable[[int, int], None] = lambda worker, session: None,
        expect_all: bool = False,
        bad_limit: int = 100,
        book: ledger.Book | None = None,
        rules: Rules | None = None,
        runtime: Runtime = SYSTEM,
    ) -> None:
        self.lease_seconds = lease_seconds
        self.book = ledger.Book("") if book is None else book
        before, now = self.book.ledger, runtime.now()
        self._members = members(names, before.workers, now)
        self._on_lost, self._on_came = on_lost, on_came
        self._expect_all = expect_all and not all(member.came for member in self._members)
        self._bad_limit = bad_limit
        self.dropped = sum(member.bad for member in self._members)  # not finite, by all
        super().__init__(runtime.condition(), before.queues, before.stopped, runtime, timeout)
        self.noun = "worker" if rules is None else rules.noun
        """What messages call a member of whom no more is known."""
        self.meetings = Meetings(rules, self.book, self._members, self._changed, runtime)
        self._work_seconds = timeout * self.meetings.updates  # each may take the limit
        self.key_values = KeyValues(runtime, before.values)
        """What the chief leaves for all tasks."""
        self.timetable = before.timetable
        """What every worker gets with its next reply."""
        # When a worker came or finished work, and when anybody's work last changed hands.
        self._progress = self._moved = now
        self._orders: dict[tuple[int, int], tuple[int, int]] = {}  # of each pass: by whom, and what
        self._polled = (-1, -1, 0.0)  # stream, epoch, and since when the chief polls them
        self._failure: SpartitoError | None = None
        self._ended = False
        self._over = runtime.event()
        self._closing: list[Callable[[], None]] = []
        self._watch = runtime.start(self._look_after, "spartito-watch")

    # Workers

    def enter(self, worker: int, local: bool = False, session: int = 0) -> int:
        """``worker`` has come; returns its session, larger than that of one there before.

        A ``local`` one lives as long as the coordinator; one that was there with a chief before
        this one says its ``session``, and keeps it. Raises `UserError` if the job has ended, has
        no such worker, or if another process has replaced it.
        """
        with self._changed:
            if not 0 <= worker < len(self._members):
                raise UserError(f"{self.noun} {worker} in a job of {len(self._members)}")
            if session:
                self.hear(worker, session)
                return session
            if self._ended:
                raise self.given_up or UserError("the job has ended", "Start a new one.")
            member = self._members[worker]
            if member.local:
                raise UserError(f"{member.name} is the chief itself", "Give each task an index.")
            dropped = self._drop(worker) if member.live else []
            self.note(ledger.Entered(worker, self.book.ledger.sessions + 1))
            session = member.session = self.book.ledger.sessions
            member.local, member.live, member.came = local, True, True
            member.heard = self._progress = self._moved = self.runtime.now()
            if self._expect_all and all(other.came for other in self._members):
                self._expect_all = False
                for queue in self._queues.values():
                    self._join_all(queue)
            self._changed.notify_all()
        self._tell_lost(worker, dropped)
        try:
            self._on_came(worker, session)
        except SpartitoError as error:
            self.fail(error)
        return session

    def hear(self, worker: int, session: int) -> None:
        """A heartbeat; one that was given up is back. `UserError` if it was replaced."""
        with self._changed:
            member = self._members[worker]
            if member.session != session:
                raise UserError(f"another process has replaced {member.name}")
            member.heard = self.runtime.now()
            if not member.live:
                member.live = True
                note("%s is back", member.name)

    def leave(self, worker: int, session: int, lost: bool) -> None:
        """A connection ends: ``lost`` without a farewell. Nothing if the worker was replaced."""
        with self._changed:
            member = self._members[worker]
            if member.session != session:
                return
            self.note(ledger.Entered(worker, 0))
            member.session, member.local = 0, False
            dropped = self._drop(worker) if member.live else []
        if lost and dropped and not self._over.is_set() and self.given_up is None:
            warn("%s is gone: its work goes to others", member.name)
        if lost or any(dropped):
            self._tell_lost(worker, dropped)

    def live(self) -> list[int]:
        """The workers that are there."""
        with self._changed:
            return [index for index, member in enumerate(self._members) if member.live]

    def take(
        self,
        worker: int,
        stream: int,
        epoch: int,
        report: Report | None,
        wait: bool = True,
        patience: float = inf,
    ) -> Work:
        """As `WorkSource.take`, but `Pause` after ``patience`` seconds too."""
        end = self.runtime.now() + (patience if wait else 0.0)
        if report is not None and report.abandoned:
            self._tell_lost(worker, self._abandon(worker, stream, report.lease))
        with self._changed:
            if report is not None:
                self._hand_in(worker, stream, report)
            while True:
                work = self._look(worker, stream, epoch)
                left = end - self.runtime.now()
                if not isinstance(work, Pause) or left <= 0 or self.meetings.states.wants(worker):
                    return work
                self._changed.wait(min(left, LOOK_SECONDS))

    # The chief

    def open(self, stream: int, plan: Plan) -> None:
        """Begin a stream: who asked for its work already gets it now."""
        with self._changed:
            self.check()
            if stream in self._queues:
                raise ValueError(f"stream {stream} was opened before")
            self._join_all(self.book.open(stream, plan))
            self._progress = self._moved = self.runtime.now()
            self._changed.notify_all()

    def gather(self, seconds: float, told: float = NOTE_SECONDS) -> list[str]:
        """Wait until all workers have come, ``seconds`` at most; returns who has not.

        After ``told`` seconds it says for whom it waits. Raises what ended the job meanwhile.
        """
        with self._changed:
            settled = lambda: self._failure is not None or not absent(self._members)  # noqa: E731
            if not self._changed.wait_for(settled, min(told, seconds)):
                note("waiting for %s", " and ".join(absent(self._members)))
                self._changed.wait_for(settled, seconds - told)
            self.check()
            return absent(self._members)

    def poll(self, stream: int, epoch: int, seconds: float) -> bool:
        """Whether all of ``epoch`` is done or the stream was ended; waits so long at most.

        Raises what the workers' reports say that is wrong, and `TaskLostError` if nothing at
        all has happened for ``timeout`` seconds while the chief polled this epoch.
        """
        with self._changed:
            if self._polled[:2] != (stream, epoch):
                self._polled = (stream, epoch, self.runtime.now())
            self._changed.wait_for(
                lambda: self._failure is not None or self._is_over(stream, epoch), seconds
            )
            over = self._is_over(stream, epoch)
            self.check(None if over else self._polled[2])
            return over

    def fail(self, error: SpartitoError) -> None:
        """Something is wrong that ends the job: the chief's next call raises it."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def failed(self, worker: int, what: str) -> None:
        """A worker's script raised: the chief's next call says so."""
        self.fail(raised(self._members[worker], what))

    def check(self, began: float | None = None) -> None:
        """Raise what went wrong; `TaskLostError` if nothing has happened since ``began``."""
        with self._changed:
            if failure := self._failure or self.given_up:
                raise failure
            if began is None:
                return
            now = self.runtime.now()
            hopeless = now - max(began, self._progress) > PATIENCE * self._work_seconds
            if not hopeless and now - max(began, self._moved) > self.timeout:
                # Work that is out comes back in time, one way or the other.
                hopeless = not any(queue.held() for queue in self._queues.values())
            if hopeless:
                raise absence(self._members, self._expect_all, self.timeout)

    def close_epoch(self, stream: int, epoch: int) -> None:
        """Let gated work of the next epoch begin."""
        with self._changed:
            self.check()
            self._queues[stream].close(epoch)
            self._changed.notify_all()

    def end_stream(self, stream: int) -> None:
        """Stop early: no more work of it, whatever is left."""
        with self._changed:
            self.note(ledger.Stopped(stream))
            self._changed.notify_all()

    def drain(self, stream: int) -> None:
        """Return when no lease of a stream is out, or the job has failed; in ``lease_seconds``."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or not self._queues[stream].held(),
                self.lease_seconds,
            )

    def reopen(self, stream: int, lost: Iterable[WorkRange]) -> int:
        """Have lost work done again, first of all; returns how many work items that are."""
        with self._changed:
            count = self._queues[stream].reopen(lost)
            self._changed.notify_all()
            return count

    def note(self, event: ledger.Event) -> None:
        """Have this known to whoever is the chief after us."""
        with self._changed:
            self.book.note(event)

    def publish(self, key: int, value: bytes) -> None:
        """Leave ``value`` for all tasks that ask for ``key``."""
        self.note(ledger.Published(key, value))
        self.key_values.publish(key, value)

    def on_close(self, action: Callable[[], None]) -> None:
        """Have ``action`` done at the end."""
        self._closing.append(action)

    @property
    def begun(self) -> bool:
        """Whether there was any work to give out so far."""
        return bool(self._queues)

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended

    def end(self) -> None:
        """The job has ended: who asks is told to stop, and nobody may enter any more."""
        with self._changed:
            if not self._ended:
                self.note(ledger.Ended())
            self._ended = True
            self._changed.notify_all()
        self.key_values.end()

    def close(self) -> None:
        """End, give the workers a while to leave, and close all connections."""
        self.end()
        with self._changed:
            self._changed.wait_for(
                lambda: not any(m.live and m.session and not m.local for m in self._members),
                LEAVE_SECONDS,
            )
        self._over.set()
        while self._closing:
            self._closing.pop()()
        self._watch.join(self.timeout)

    # Inside; all but the last two with the lock held

    def _look(self, worker: int, stream: int, epoch: int) -> Work:
        over = self._ended and isinstance(self._failure, UserError)
        if failure := self.told or (self._failure if over else None):
            raise failure
        queue = self._queues.get(stream)
        if self._ended or stream in self._stopped:
            # The others of its group wait for what was granted to it before the end.
            redo = None
            if queue is not None and not self._ended:
                redo = queue.granted(worker) or queue.unheard(worker)
            return redo or Complete(epoch, stop=True)
        if queue is None or self._expect_all or self._failure or self.given_up:
            return Pause()
        if queue.is_complete(epoch):
            return Complete(epoch)
        if unheard := queue.unheard(worker):
            return unheard
        lease = queue.take(worker, epoch, self.runtime.now())
        if lease is None:
            return Pause()
        self.meetings.begin(worker)
        if lease.group:
            self._changed.notify_all()  # the others' leases were granted with it
        return lease

    def _abandon(self, worker: int, stream: int, lease: int) -> list[Lease | None]:
        """Give a lease to others; returns it if it was still out."""
        with self._changed:
            queue = self._queues.get(stream)
            held = queue.held() if queue else []
            out = [self.meetings.joined(worker, stream, one) for _, one in held if one.id == lease]
            for one in out:
                self.note(ledger.Gone(ledger.loss(worker, one)))
                queue.abandon(one.id)  # type: ignore[union-attr]
            return list(out)

    def _hand_in(self, worker: int, stream: int, report: Report) -> None:
        member, now, counts = self._members[worker], self.runtime.now(), False
        queue = self._queues.get(stream)
        if queue is not None and not report.abandoned:
            try:
                self._check_order(worker, stream, report)
                counts = queue.finish(report.lease, report.sums, report.ended, now, report.metrics)
                if counts:
                    self._progress = self._moved = now
            except SpartitoError as error:
                self.fail(error)
        if report.bad and (counts or report.abandoned):
            self.note(ledger.Dropped(worker, report.bad))
            member.bad += report.bad
            detail = shown(report.detail, 1000)
            warn("%s: %d pushes were not finite and dropped: %s", member.name, report.bad, detail)
            self.dropped = total = sum(other.bad for other in self._members)
            if total > self._bad_limit:
                self.fail(spoiled(member, total, self._bad_limit, detail))
        self._changed.notify_all()

    def _check_order(self, worker: int, stream: int, report: Report) -> None:
        """Refuse a worker whose data come in another order than those of who reported first.

        Who found no batch, as behind the end of a stream, has seen nothing of an order.
        """
        if not report.drawn:
            return
        for _, lease in self._queues[stream].held():
            if lease.id == report.lease:
                own = worker, report.drawn
                first, drawn = self._orders.setdefault((stream, lease.pass_), own)
                if drawn != report.drawn:
                    raise other_order(self._members[worker], self._members[first])

    def _is_over(self, stream: int, epoch: int) -> bool:
        return stream in self._stopped or self._queues[stream].is_complete(epoch)

    def _join_all(self, queue: WorkQueue) -> None:
        for index in self.live():
            queue.join(index)

    def _drop(self, worker: int) -> list[Lease | None]:
        """Give back all that ``worker`` has; returns its leases, [None] if it had none."""
        self._members[worker].live = False
        self._changed.notify_all()
        found: list[Lease | None] = [
            self.meetings.joined(worker, stream, lease)
            for stream, queue in self._queues.items()
            for holder, lease in queue.held()
            if holder == worker
        ] or [None]
        for lease in found:  # first: that the servers hear of it twice does no harm
            self.note(ledger.Gone(ledger.loss(worker, lease)))
        for queue in self._queues.values():
            queue.drop(worker)
        self.meetings.leave(worker)
        return found

    def _find_silent(self) -> list[tuple[int, str, list[Lease | None]]]:
        """Give up who is silent or does not finish: (worker, why, its leases)."""
        now, found = self.runtime.now(), []
        for index, member in enumerate(self._members):
            if member.live and not member.local and now - member.heard > self.lease_seconds:
                why = f"{member.name} has not been heard of for {self.lease_seconds:g} s"
                found.append((index, why, self._drop(index)))
        for queue in self._queues.values():
            for index in {worker for worker, _ in queue.expired(now, self._work_seconds)}:
                member, live = self._members[index], self._members[index].live
                why = f"{member.name} has not finished its work in {self._work_seconds:g} s"
                found.append((index, why, self._drop(index)))
                member.live = live  # it beats: it may still go on
                self._moved = now
        return found

    def _tell_lost(self, worker: int, leases: list[Lease | None]) -> None:
        try:
            for lease in leases:
                self._on_lost(worker, lease)
        except SpartitoError as error:
            self.fail(error)

    def _look_after(self) -> None:
        while not self._over.wait(min(LOOK_SECONDS, self.lease_seconds / 4)):
            with self._changed:
                found = [] if self._ended or self.quiet else self._find_silent()
            for worker, why, leases in found:
                warn("%s: its work goes to others", why)
                self._tell_lost(worker, leases)
