"""How a task that computes reaches the coordinator: over a connection, or in the same process."""

from __future__ import annotations

import contextlib
from typing import TypeVar

import msgspec

from spartito.cluster.secret import NO_SECRET, Key
from spartito.collectives.sockets import reach
from spartito.collectives.versions import Versions
from spartito.errors import TaskLostError, UserError
from spartito.failpoints import failpoint
from spartito.heartbeat import dump_stacks, keep_files, last_words
from spartito.ps.protocol.runtime import SYSTEM, Channel, Runtime
from spartito.ps.protocol.wire import LONG_HEADER, Gone, ProtocolError, Wire
from spartito.ps.protocol.work import (
    MAX_PUBLISHED,
    PURPOSE,
    Ask,
    Assignment,
    Failed,
    Heartbeat,
    Hello,
    Leave,
    Pause,
    Refused,
    Report,
    Take,
    ToWorker,
    Value,
    Welcome,
    Work,
    WorkSource,
)

Reply = TypeVar("Reply")

MAX_TOLD = 500
"""Characters of an exception that are sent to the chief."""


class WorkerLink(WorkSource):
    """A worker's connection to the coordinator at ``host:port``, which is ``chief``'s.

    A thread gives a heartbeat as often as the coordinator wants. Calls raise `UserError`
    if the job has ended, another process has replaced this one or the chief does not know the job's
    ``key``, and `TaskLostError` if the chief is gone or does not reply within ``timeout`` seconds.
    """

    def __init__(self, wire: Channel, chief: str, worker: int, runtime: Runtime = SYSTEM) -> None:
        self._wire, self._chief = wire, chief
        self._timetable = b""
        self._ask_lock = runtime.lock()  # of asking, and of hearing the reply
        self._send_lock = runtime.lock()  # of sending
        self._closed = runtime.event()
        try:
            welcome = self._ask(Hello(worker, Versions.own()), Welcome)[0]
        except BaseException:
            self._wire.close()
            raise
        self._wire.header_limit = LONG_HEADER
        self._generation = welcome.generation
        keep_files([chief])
        every = welcome.heartbeat
        self._heartbeats = runtime.start(lambda: self._beat(every), "spartito-heartbeat")

    @classmethod
    def connect(
        cls, host: str, port: int, chief: str, worker: int, *, timeout: float, key: Key = NO_SECRET
    ) -> WorkerLink:
        """Connect to the coordinator at ``host:port``, which is ``chief``'s."""
        sock = reach(host, port, chief, timeout, key=key, purpose=PURPOSE)
        return cls(Wire(sock, ToWorker, limit=MAX_PUBLISHED, timeout=timeout), chief, worker)

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def timetable(self) -> bytes:
        return self._timetable

    @property
    def sent(self) -> int:
        """Bytes."""
        return self._wire.sent

    @property
    def received(self) -> int:
        """Bytes."""
        return self._wire.received

    def take(self, stream: int, epoch: int, report: Report | None, wait: bool = True) -> Work:
        metrics = b"" if report is None else report.metrics
        if len(metrics) > MAX_PUBLISHED:
            raise UserError(
                f"the metrics of one work range keep {len(metrics) >> 20} MiB, and at most "
                f"{MAX_PUBLISHED >> 20} can be reported to the chief",
                "Take a metric that counts instead of keeping rows, or a synchronous strategy.",
            )
        if report is not None:
            failpoint("ps.worker.before_report")
            report = msgspec.structs.replace(report, metrics=b"")
        while True:
            reply, payload = self._ask(Take(stream, epoch, report, wait), Assignment, metrics)
            if reply.changed:
                self._timetable = payload
            if not wait or not isinstance(reply.work, Pause):
                return reply.work
            report, metrics = None, b""  # it was received: a reply came

    def published(self, key: int) -> bytes:
        while True:
            reply, payload = self._ask(Ask(key), Value)
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
        """The reply to ``message`` and its payload."""
        try:
            with self._ask_lock:
                with self._send_lock:
                    self._wire.send(message, payload)
                reply = self._wire.receive()
                payload = bytes(self._wire.payload)
        except Gone as error:
            raise TaskLostError(
                f"{self._chief} is gone{last_words(self._chief)}",
                f"Look at the last lines of that task.{dump_stacks('the chief is gone')}",
            ) from error
        except TimeoutError as error:
            raise TaskLostError(
                f"{self._chief} did not reply within {self._wire.timeout:g} s"
                + last_words(self._chief),
                "Look at the last lines of that task; SPARTITO_TIMEOUT sets the limit in seconds."
                + dump_stacks("the chief did not reply"),
            ) from error
        if isinstance(reply, Refused):
            raise UserError(reply.what, reply.do)
        if not isinstance(reply, kind):
            raise ProtocolError(f"{kind.__name__} was expected, {type(reply).__name__} came")
        return reply, payload

    def _beat(self, every: float) -> None:
        while not self._closed.wait(every):
            try:
                with self._send_lock:
                    self._wire.send(Heartbeat())
            except (Gone, TimeoutError):
                return  # whoever asks next is told
