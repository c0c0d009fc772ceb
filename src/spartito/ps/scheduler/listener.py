"""Who comes to the coordinator: one thread for each worker's connection."""

from __future__ import annotations

import contextlib

import msgspec

from spartito.collectives.membership.versions import Versions, check_versions
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.notes import RareWarnings, shown
from spartito.ps.protocol.runtime import Channel, Joinable
from spartito.ps.protocol.work import (
    MAX_PUBLISHED,
    PURPOSE,
    Arrival,
    Ask,
    Assignment,
    Decision,
    Failed,
    Fetch,
    Given,
    Heartbeat,
    Hello,
    Leave,
    Part,
    Reached,
    Refused,
    Take,
    Taken,
    ToCoordinator,
    Value,
    Welcome,
)
from spartito.ps.scheduler.coordinator import REPLY_SECONDS, Coordinator
from spartito.wire.acceptor import Acceptor
from spartito.wire.frames import Gone, ProtocolError, Wire
from spartito.wire.limits import LONG_HEADER
from spartito.wire.secret import NO_SECRET, Key
from spartito.wire.streams import Connection, Socket

HEARTBEAT_SECONDS = 1.0
HELLO_SECONDS = 10.0
"""A connection that has not said who it is by then is closed."""
ASKS = Take | Arrival | Ask | Given | Fetch
"""What has a reply."""


class WorkerListener:
    """Serves the connections of workers until the coordinator closes."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._seldom = RareWarnings()
        self._lock = coordinator.runtime.lock()
        self._connections: dict[Channel, Joinable] = {}
        # Several heartbeat in the time after which their absence is noticed.
        self._heartbeat = min(HEARTBEAT_SECONDS, coordinator.lease_seconds / 4)
        self._acceptor: Acceptor | None = None
        coordinator.on_close(self.close)

    def listen(self, listener: Socket, key: Key = NO_SECRET) -> None:
        """Let workers in at ``listener`` that know the job's ``key``."""
        self._acceptor = Acceptor(listener, self._begin, key=key, purpose=PURPOSE, name="the chief")

    def close(self) -> None:
        """End all connections and let nobody in. Calling it again changes nothing."""
        if self._acceptor is not None:
            self._acceptor.close()
        with self._lock:
            connections = dict(self._connections)
        for wire, thread in connections.items():
            wire.close()
            thread.join()

    def _begin(self, sock: Connection) -> None:
        try:
            wire = Wire(sock, ToCoordinator, timeout=HELLO_SECONDS)
        except OSError:
            sock.close()  # it is gone already
            return
        self.serve(wire)

    def serve(self, wire: Channel) -> None:
        """Serve one connection until it ends."""
        with self._lock:
            self._connections[wire] = self._coordinator.runtime.current()
        try:
            hello = wire.receive()
            if not isinstance(hello, Hello):
                raise ProtocolError(f"Hello was expected, {type(hello).__name__} came")
            if self._fits(wire, hello):
                self._admit(wire, hello)
        except (UserError, TaskLostError) as error:
            self._refuse(wire, error)
        except ProtocolError as error:
            self._seldom.warn("a worker's connection was closed: %s", shown(str(error)))
        except (Gone, TimeoutError):
            pass  # an unknown peer; the coordinator knows of a worker's end
        finally:
            with self._lock:
                self._connections.pop(wire)
            wire.close()

    def _fits(self, wire: Channel, hello: Hello) -> bool:
        """Whether the worker runs what we run; else it is refused, and a new job ends."""
        try:
            who = f"{self._coordinator.noun} {hello.worker}"
            check_versions({"the chief": Versions.own(), who: hello.versions})
        except UserError as error:
            self._refuse(wire, error)
            if self._coordinator.begun:
                self._seldom.warn("a worker was refused: %s", shown(str(error), 1000))
            else:
                self._coordinator.fail(error)
            return False
        return True

    def _admit(self, wire: Channel, hello: Hello) -> None:
        worker = hello.worker
        session = self._coordinator.enter(worker, session=hello.generation)
        lost = True
        if not hello.generation:
            self._coordinator.meetings.states.enter(worker)
        try:
            wire.send(Welcome(self._heartbeat, session))
            wire.header_limit, wire.limit = LONG_HEADER, MAX_PUBLISHED
            # A silent worker is the watch's business, one that does not read is nobody's.
            wire.set_timeouts(send=self._coordinator.timeout, receive=None)
            lost = not self._converse(wire, worker, session)
        except (UserError, TaskLostError) as error:
            self._refuse(wire, error)  # first: a chief that ends waits for those who are there
        finally:
            self._coordinator.leave(worker, session, lost)

    def _converse(self, wire: Channel, worker: int, session: int) -> bool:
        """Reply until the worker leaves: True."""
        known = b""
        patience = min(REPLY_SECONDS, self._heartbeat)
        states = self._coordinator.meetings.states
        while True:
            message = wire.receive()
            self._coordinator.hear(worker, session)
            if isinstance(message, ASKS) and (failure := self._coordinator.refusal()):
                raise failure
            match message:
                case Take(stream, epoch, report, wait):
                    if report is not None and len(wire.payload):
                        report = msgspec.structs.replace(report, metrics=bytes(wire.payload))
                    states.heard(worker)
                    work = self._coordinator.take(worker, stream, epoch, report, wait, patience)
                    timetable = self._coordinator.timetable
                    changed = timetable != known
                    told = states.asks(worker), states.keeps(worker)
                    wire.send(Assignment(work, changed, *told), timetable if changed else b"")
                    known = timetable
                case Reached():
                    self._coordinator.reach(worker, message, bytes(wire.payload))
                case Arrival():
                    merge = self._coordinator.meetings.ask(worker, message, patience)
                    wire.send(Decision(merge, merge is None and states.asks(worker)))
                case Ask(key):
                    value = self._coordinator.key_values.published(key, patience)
                    if failure := self._coordinator.refusal():  # it was published for others
                        raise failure
                    if value is None and self._coordinator.ended:
                        raise UserError("the job has ended", "Start a new one.")
                    wire.send(Value(value is not None, states.asks(worker)), value or b"")
                case Given():
                    states.take(worker, message, bytes(wire.payload))
                    wire.send(Taken())
                case Fetch(begin):
                    part, last = states.part(worker, begin)
                    wire.send(Part(last), part)
                case Failed(what):
                    self._coordinator.failed(worker, what)
                case Leave():
                    return True
                case Heartbeat():
                    pass
                case _:
                    raise ProtocolError(f"a second {type(message).__name__} came")

    def _refuse(self, wire: Channel, error: SpartitoError) -> None:
        what, _, do = str(error).partition("\n  ")
        with contextlib.suppress(Gone, TimeoutError):  # it may not wait for the reply
            wire.send(Refused(what, do, isinstance(error, TaskLostError)))
