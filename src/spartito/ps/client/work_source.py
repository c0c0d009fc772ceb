"""How a task that computes reaches the coordinator: over a connection, or in the same process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from spartito.collectives.membership.versions import Versions
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.failpoints import failpoint
from spartito.heartbeat import dump_stacks, keep_files, last_words
from spartito.notes import note
from spartito.ps.protocol.runtime import SYSTEM, Channel, Runtime
from spartito.ps.protocol.work import (
    MAX_PUBLISHED,
    PART,
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
    Merge,
    OwnState,
    Part,
    Pause,
    Reached,
    Refused,
    Report,
    Take,
    Taken,
    ToWorker,
    Value,
    Welcome,
    Work,
    WorkSource,
)
from spartito.wire.dialing import reach
from spartito.wire.frames import Gone, ProtocolError, Wire
from spartito.wire.limits import LONG_HEADER
from spartito.wire.secret import NO_SECRET, Key

Reply = TypeVar("Reply")
Dial = Callable[[float | None], Channel]
"""Connects to the chief within so many seconds, None: within the time limit."""

MAX_TOLD = 500
"""Characters of an exception that are sent to the chief."""
DIAL_SECONDS = 1.0
"""How long a chief that is to come again is dialled before a look at what else has happened."""


class WorkerLink(WorkSource):
    """A worker's connection to the coordinator of ``chief``, made by ``dial``.

    A thread gives a heartbeat as often as the coordinator wants. Calls raise `UserError`
    if the job has ended, another process has replaced this one or the chief does not know the job's
    secret, and `TaskLostError` if the chief has failed, is gone or does not reply in time. With
    ``patience`` another process may go on as the chief: it is waited for so many seconds.
    """

    def __init__(
        self,
        dial: Dial,
        chief: str,
        worker: int,
        runtime: Runtime = SYSTEM,
        patience: float = 0.0,
    ) -> None:
        self._dial, self._chief, self._worker = dial, chief, worker
        self._runtime, self._patience = runtime, patience
        self._timetable, self._generation = b"", 0
        self._own: OwnState | None = None
        self._sent = self._received = 0  # by connections that have ended
        self._ask_lock = runtime.lock()  # of asking, and of hearing the reply
        self._send_lock = runtime.lock()  # of sending
        self._meet_lock = runtime.lock()  # of finding another chief
        self._closed = runtime.event()
        self._wire = dial(None)
        try:
            self._greet(self._wire)
        except Gone as error:
            self._meet_again(error, self._wire)
        except BaseException:
            self._wire.close()
            raise
        keep_files([chief])
        self._heartbeats = runtime.start(self._beat, "spartito-heartbeat")

    @classmethod
    def connect(
        cls, host: str, port: int, chief: str, worker: int, *, timeout: float,
        key: Key = NO_SECRET, patience: float = 0.0,
    ) -> WorkerLink:  # fmt: skip
        """Connect to the coordinator at ``host:port``, which is ``chief``'s."""

        def dial(seconds: float | None) -> Channel:
            limit = timeout if seconds is None else seconds
            sock = reach(host, port, chief, limit, key=key, purpose=PURPOSE)
            return Wire(sock, ToWorker, limit=MAX_PUBLISHED, timeout=timeout)

        return cls(dial, chief, worker, patience=patience)

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def timetable(self) -> bytes:
        return self._timetable

    @property
    def sent(self) -> int:
        """Bytes."""
        return self._sent + self._wire.sent

    @property
    def received(self) -> int:
        """Bytes."""
        return self._received + self._wire.received

    def take(self, stream: int, epoch: int, report: Report | None, wait: bool = True) -> Work:
        metrics = b"" if report is None else report.metrics
        _check_size(metrics)
        if report is not None:
            failpoint("ps.worker.before_report")
            report = msgspec.structs.replace(report, metrics=b"")
        while True:
            reply, payload = self._ask(Take(stream, epoch, report, wait), Assignment, metrics)
            if reply.changed:
                self._timetable = payload
            if reply.has:
                self._fetch()
            if reply.wants:
                self.give()
            if not wait or not isinstance(reply.work, Pause):
                return reply.work
            report, metrics = None, b""  # it was received: a reply came

    def reach(self, reached: Reached, metrics: bytes) -> None:
        _check_size(metrics)
        with contextlib.suppress(Gone), self._send_lock:  # who asks next is told
            self._wire.send(reached, metrics)

    def merge(self, arrival: Arrival) -> Merge:
        while True:
            reply = self._ask(arrival, Decision)[0]
            if reply.merge is not None:
                return reply.merge
            if reply.wants:
                self.give()

    def keep(self, own: OwnState) -> None:
        self._own = own

    def give(self) -> None:
        if self._own is None:
            return
        at, state = self._own.show()
        for begin in range(0, max(1, len(state)), PART):
            end = begin + PART
            given = Given(at, first=not begin, last=end >= len(state))
            self._ask(given, Taken, state[begin:end])

    def _fetch(self) -> None:
        """Go on from what the chief has for this group."""
        parts, last = list[bytes](), False
        while not last:
            reply, part = self._ask(Fetch(sum(map(len, parts))), Part)
            parts, last = [*parts, part], reply.last
        if not any(parts):
            raise TaskLostError(
                f"{self._chief} has lost the state from which this group was to go on",
                "Start again from the checkpoint.",
            )
        if self._own is not None:
            self._own.load(b"".join(parts))

    def published(self, key: int) -> bytes:
        while True:
            reply, payload = self._ask(Ask(key), Value)
            if reply.wants:
                self.give()
            if reply.found:
                return payload

    def fail(self, what: str) -> None:
        with (
            contextlib.suppress(Gone, TimeoutError),
            self._send_lock,
        ):  # the chief may be gone first
            self._wire.send(Failed(what[:MAX_TOLD]))

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        with (
            contextlib.suppress(Gone, TimeoutError),
            self._send_lock,
        ):  # the chief may be gone first
            self._wire.send(Leave())
        self._wire.close()
        self._heartbeats.join()

    def _ask(
        self, message: msgspec.Struct, kind: type[Reply], payload: bytes = b""
    ) -> tuple[Reply, bytes]:
        """The reply to ``message`` and its payload; another chief is asked the same again."""
        with self._ask_lock:
            while True:
                wire = self._wire
                try:
                    return self._exchange(wire, message, kind, payload)
                except Gone as error:
                    self._meet_again(error, wire)

    def _exchange(
        self, wire: Channel, message: msgspec.Struct, kind: type[Reply], payload: bytes = b""
    ) -> tuple[Reply, bytes]:
        try:
            with self._send_lock:
                wire.send(message, payload)
            reply = wire.receive()
        except TimeoutError as error:
            raise TaskLostError(
                f"{self._chief} did not reply within {wire.timeout:g} s" + last_words(self._chief),
                "Look at the last lines of that task; SPARTITO_TIMEOUT sets the limit in seconds."
                + dump_stacks("the chief did not reply"),
            ) from error
        if isinstance(reply, Refused):
            raise (TaskLostError if reply.lost else UserError)(reply.what, reply.do)
        if not isinstance(reply, kind):
            raise ProtocolError(f"{kind.__name__} was expected, {type(reply).__name__} came")
        return reply, bytes(wire.payload)

    def _greet(self, wire: Channel) -> None:
        """Say who we are, and were."""
        hello = Hello(self._worker, Versions.own(), self._generation)
        welcome = self._exchange(wire, hello, Welcome)[0]
        wire.header_limit = LONG_HEADER
        self._generation, self._every = welcome.generation, welcome.heartbeat

    def _meet_again(self, error: Gone, broken: Channel) -> None:
        """Have a connection to a chief after one broke; `TaskLostError` if none comes in time."""
        with self._meet_lock:
            if broken is not self._wire:
                return  # the other thread has one
            end = self._runtime.now() + self._patience
            if self._patience:
                note("%s is gone: waiting %g s for another one", self._chief, self._patience)
            while (left := end - self._runtime.now()) > 0 and not self._closed.is_set():
                try:
                    wire = self._dial(min(left, DIAL_SECONDS))
                except (OSError, TaskLostError):
                    self._runtime.sleep(DIAL_SECONDS / 10)
                    continue
                try:
                    self._greet(wire)
                except Gone:
                    wire.close()
                    continue
                except BaseException:
                    wire.close()
                    raise
                self._sent, self._received = self.sent, self.received
                self._wire.close()
                self._wire = wire
                return
        raise TaskLostError(
            f"{self._chief} is gone{last_words(self._chief)}",
            f"Look at the last lines of that task.{dump_stacks('the chief is gone')}",
        ) from error

    def _beat(self) -> None:
        while not self._closed.wait(self._every):
            wire = self._wire
            try:
                with self._send_lock:
                    wire.send(Heartbeat())
            except TimeoutError:
                return  # whoever asks next is told
            except Gone as error:
                try:
                    self._meet_again(error, wire)
                except (OSError, SpartitoError):
                    return


def _check_size(metrics: bytes) -> None:
    if len(metrics) > MAX_PUBLISHED:
        raise UserError(
            f"the metrics of one work range keep {len(metrics) >> 20} MiB, and at most "
            f"{MAX_PUBLISHED >> 20} can be reported to the chief",
            "Take a metric that counts instead of keeping rows, or a synchronous strategy.",
        )
