"""The chief of a job with parameter servers: it gives out work and watches the servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from spartito.errors import SpartitoError, TaskLostError
from spartito.failpoints import failpoint
from spartito.notes import note, warn
from spartito.ps.client.appointments import Appointments, View
from spartito.ps.client.control import Control
from spartito.ps.client.link import Link
from spartito.ps.protocol.histogram import Histogram
from spartito.ps.protocol.messages import Flush, GetRecord, Status, Values
from spartito.ps.protocol.runtime import Joinable
from spartito.ps.protocol.timetable import Timetable
from spartito.ps.protocol.work import Lease
from spartito.ps.scheduler.coordinator import Coordinator
from spartito.ps.scheduler.ledger import Appointed, Met, Scheduled, loss
from spartito.ps.scheduler.plan import Plan
from spartito.ps.scheduler.planner import Planner
from spartito.ps.scheduler.queue import WorkRange

WATCH_SECONDS = 1.0  # between two looks at the servers
RESCUE_SECONDS = 5.0  # in which a chief whose training has failed may begin to save
JOB = 0  # what is published first

OnLost = Callable[[int, Lease | None], None]
"""Is called with a worker that is lost, and the lease that it had."""
OnCame = Callable[[int, int], None]
"""Is called with a worker that connects, and the generation of its process."""


def views_of(appointed: Mapping[int, Appointed]) -> list[View]:
    """What another chief had decided, by span."""
    return [
        View(one.term, one.primary, None if one.backup < 0 else one.backup)
        for _, one in sorted(appointed.items())
    ]


class Chief:
    """Holds the coordinator and the control of the servers, and tells each what the other lost."""

    def __init__(
        self,
        make: Callable[[OnLost, OnCame], Coordinator],
        control: Control,
        job: str,
        data_shards: int,
        appointments: Appointments | None = None,
        in_step: bool = False,
    ) -> None:
        """``make`` builds the coordinator, which reports lost and new workers to its arguments;
        ``control`` has links of the job ``job``; a global batch has ``data_shards`` work items;
        ``appointments`` says which of two servers is the primary; ``in_step``: workers wait for
        each other at every update, and users expect the numbers of a synchronous training.
        """
        self.control, self.job, self._in_step = control, job, in_step
        self.coordinator = make(self._worker_lost, control.fence)
        self.book = self.coordinator.book
        self._appointments = appointments or Appointments([], job)
        self._appointments.fail = self.coordinator.fail
        if self.book.goes_on:
            control.loaded.update(range(len(control.links)))
        self._appointments.loaded = control.loaded
        self._appointments.follow(self._appointed)
        self.lost = self.book.ledger.lost_items
        """Work items whose updates were lost with a server, and are computed again."""
        self.planner: Planner | None = None
        """Knows what options the servers are to have, and when."""
        self._shards = data_shards
        self._streams = sorted(self.book.ledger.queues)
        self._over = self.coordinator.runtime.event()
        self._repairing = self.coordinator.runtime.lock()
        self.published = JOB
        """The key of the last value."""
        self._watch: Joinable | None = None
        self._ending: Joinable | None = None
        self._failure: TaskLostError | None = None
        self._leave: Callable[[], None] = lambda: None
        self._works = 0

    def begin(self) -> None:
        """Let the workers come: the servers have their values.

        Where another process was the chief before, the servers are told what it may have had no
        time for, and what they have forgotten meanwhile is leased again.
        """
        ledger, links = self.book.ledger, self.control.links
        if self.book.goes_on:
            sessions = {n: known.last for n, known in ledger.workers.items()}
            self.control.go_on(ledger.timetable, sessions, ledger.told)
            self.control.restarted.update(
                number
                for number, link in enumerate(links)
                if link.incarnation != ledger.servers.get(number)
            )
            self._look_at_servers()
        else:
            for number, link in enumerate(links):
                ledger.servers[number] = link.incarnation
            ledger.values[JOB] = self.job.encode()
            self.coordinator.key_values.publish(JOB, ledger.values[JOB])
        self.book.begin()
        self._watch = self.coordinator.runtime.start(self._look_after, "spartito-watch")

    def gather(self, seconds: float) -> None:
        """Wait for all workers; after ``seconds`` the job begins with those who came."""
        absent = self.coordinator.gather(seconds)
        if absent:
            warn("%s did not come within %g s: the others begin", " and ".join(absent), seconds)

    def open(self, stream: int, plan: Plan) -> None:
        """Begin to give out the work of a stream, unless another chief did so."""
        if stream not in self._streams:
            self._streams.append(stream)
            self.coordinator.open(stream, plan)

    def stop(self) -> None:
        """Give out no more work of the stream that is open."""
        if self._streams:
            self.coordinator.end_stream(self._streams[-1])

    def end_stream(self, stream: int) -> None:
        """Give out no more work of a stream, and wait until no lease of it is out."""
        self.coordinator.end_stream(stream)
        self.coordinator.drain(stream)

    def flush(self, keep: bool = False) -> None:
        """Have the servers apply what waits to be put together with more pushes.

        ``keep``: and write a snapshot, as the workers will not be there to compute it again.
        """
        self.control.tell(Flush(keep))

    def is_settled(self, stream: int, epoch: int) -> bool:
        """Whether all of an epoch is done and no server has forgotten any of it."""
        self._look_at_servers()
        return self.coordinator.poll(stream, epoch, 0.0)

    def progress(self) -> Values:
        """How far the first server is."""
        reply: Values = self.control.tell(Status())[0]
        return reply

    def staleness(self) -> dict[str, int]:
        """How many pushes came so many updates late, over all servers."""
        total = Histogram()
        for record in self.control.tell(GetRecord()):
            total.merge(Histogram.from_dict(record.figures["staleness"]))
        return total.to_dict()

    def publish(self, value: Any) -> None:
        """Plain values for all who wait for the next ones."""
        self.published += 1
        self.coordinator.publish(self.published, json.dumps(value).encode())

    def recall(self) -> list[Any]:
        """The next value, in a list, where another chief has published it; else nothing."""
        value = self.book.ledger.values.get(self.published + 1)
        if value is None:
            return []
        self.published += 1
        return [json.loads(value)]

    def go_on(self, planner: Planner, state: dict[str, Any], step: int) -> None:
        """Tell the servers the options from ``step`` on, where another chief had looked last."""
        with planner.lock:
            planner.load_state_dict(state)
            told = planner.write(step)
            self._tell(planner.extend(self.progress().pushes // self._shards) or told)

    def schedule(self, step: int) -> None:
        """Send all tasks the options from global step ``step`` on, unless they have them."""
        if self.planner is not None:
            with self.planner.lock:
                self._tell(self.planner.write(step))

    @contextmanager
    def at_work(self) -> Generator[None]:
        """A block in which the chief's script has it do something, as to save."""
        self._works += 1
        try:
            yield
        finally:
            self.control.used = self.coordinator.runtime.now()
            self._works -= 1

    def fail(
        self, error: TaskLostError, links: Sequence[Link], spares: bool, leave: Callable[[], None]
    ) -> None:
        """A training of the chief has failed, and with it the job; its process may live on.

        All hear of it `RESCUE_SECONDS` after the chief was last at work, and get no more work until
        then: it may still save, and a launcher ends it soon after the first of them.

        Args:
            error: What all others raise.
            links: The chief's other connections to the servers.
            spares: Whether servers stay until `close`.
            leave: Tells those of the chief's own group.
        """
        if self._failure is None:
            self._failure, self._leave = error, leave
            self.coordinator.give_up(error, quiet=True)
            end = partial(self._end_others, error, () if spares else links, spares)
            self._ending = self.coordinator.runtime.start(end, "spartito-ending")

    def _end_others(self, error: TaskLostError, links: Sequence[Link], spares: bool) -> None:
        coordinator, now = self.coordinator, self.coordinator.runtime.now
        began = now()
        while not self._over.wait(WATCH_SECONDS / 4):
            quiet = now() - max(began, self.control.used)
            if not self._works and quiet >= min(RESCUE_SECONDS, coordinator.timeout):
                self._end_workers(error)
                if not spares:
                    self.control.end(error)
                    for link in links:
                        link.end(error)
                    self._appointments.close(end=True, why=str(error))
                return

    def _end_workers(self, error: TaskLostError) -> None:
        self.coordinator.give_up(error)
        leave, self._leave = self._leave, lambda: None
        leave()

    def close(self) -> None:
        """End the job: the workers leave, then the servers end."""
        if self._failure is not None:
            self._end_workers(self._failure)
        self.coordinator.close()
        self.book.remove()
        self._over.set()
        for thread in filter(None, (self._watch, self._ending)):
            thread.join()
        for error in self.control.end():
            warn("%s", error)
        self.control.close()
        self._appointments.close(end=True)

    def _appointed(self, span: int, view: View) -> None:
        backup = -1 if view.backup is None else view.backup
        self.coordinator.note(Appointed(span, view.term, view.primary, backup))

    def _worker_lost(self, worker: int, lease: Lease | None) -> None:
        self.control.lose(loss(worker, lease))

    def _look_after(self) -> None:
        try:
            while not self._over.wait(WATCH_SECONDS):
                self._look_at_servers()
        except SpartitoError as error:
            if not self._over.is_set():
                self.coordinator.fail(error)

    def _look_at_servers(self) -> None:
        """Ask all for their counts; returns when what restarted servers lost is leased again."""
        with self._repairing:
            found = self.control.tell(Status())
            self._look_ahead(min(values.pushes for values in found) // self._shards)
            while self.control.restarted:
                self._reopen(self.control.restarted.pop())

    def _look_ahead(self, step: int) -> None:
        """The servers are at ``step``, while the chief may be busy with something else."""
        if self.planner is not None:
            with self.planner.lock:
                self._tell(self.planner.extend(step))

    def _tell(self, timetable: Timetable | None) -> None:
        if timetable is not None:
            self.coordinator.note(Scheduled(msgspec.msgpack.encode(timetable)))
            self.control.schedule(timetable)
        self.coordinator.timetable = self.control.timetable

    def _reopen(self, server: int) -> None:
        """Have computed again what a server that was started again has not applied.

        Work items of leases that are out count too: their workers may not notice, if all was said.
        """
        failpoint("ps.chief.before_reopen")
        applied, count = self.control.applied(server, self._shards), 0
        for stream in self._streams:
            missing = [
                WorkRange(work.pass_, work.data_shard, *span)
                for work in self.coordinator.begun_in(stream)
                for span in applied.missing(stream, *work)
            ]
            count += self.coordinator.reopen(stream, sorted(missing))
        self.lost += count
        link = self.control.links[server]
        self.coordinator.note(Met(server, link.incarnation, count))
        name = link.address.name
        if count:
            warn("%s was started again: %d work items are done again", name, count)
            if self._in_step and len(self.control.links) > 1:
                warn(
                    "they are computed with newer values of the other servers, so the numbers are "
                    "not those of a training without the loss; with servers={'replicas': 2} "
                    "nothing is lost"
                )
        else:
            note("%s was started again and had lost nothing", name)
