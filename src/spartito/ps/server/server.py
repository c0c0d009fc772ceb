"""A parameter server: it listens, a thread per task serves, and a snapshot is kept."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from spartito.errors import TaskLostError, UserError
from spartito.heartbeat import SERVE, beat
from spartito.notes import RareWarnings, note, warn
from spartito.ps.protocol.messages import PURPOSE, Errand, Hello, Refused, Reply, Request
from spartito.ps.protocol.runtime import Channel
from spartito.ps.server.connection import Connection
from spartito.ps.server.copies import COPY_SECONDS
from spartito.ps.server.host import Served
from spartito.ps.server.replica import Replica
from spartito.ps.server.snapshot import Snapshot
from spartito.ps.server.store import Store
from spartito.system import shares_memory
from spartito.wire.acceptor import Acceptor
from spartito.wire.addresses import split_address
from spartito.wire.dialing import reach
from spartito.wire.frames import Wire
from spartito.wire.limits import GREETING_SECONDS, LONG_SILENCE
from spartito.wire.secret import NO_SECRET, Key
from spartito.wire.streams import Connection as Secured
from spartito.wire.streams import Socket, keep_alive

EARLY = 0.1
"""Of the time between two snapshots: after this the first one is written."""
LINGER_SECONDS = 30.0  # for tasks that still look at values when the job has ended
LOOK_SECONDS = 0.5
AWAY = 0.5  # of the time limit: who waits here gets the error before its own limit is over


def pauses(seconds: float) -> Iterator[float]:
    """Seconds between snapshots: a tenth of ``seconds`` at first, then twice the last, up to it."""
    pause = seconds * EARLY
    while True:
        yield pause
        pause = min(2 * pause, seconds)


class Server:
    """Serves a `Store` until the chief says that the job has ended.

    ``name`` and ``chief`` are tasks' names for messages; ``timeout`` is how long the chief may
    be silent, in seconds, and half of it how long its connection may be broken, or ``patience``, if
    that is longer. A ``snapshot`` is written every ``seconds``, at first sooner (`pauses`). Who
    connects at ``listener`` must know ``key``, the job's secret.
    """

    def __init__(
        self,
        store: Store,
        listener: Socket | None,
        *,
        name: str,
        chief: str,
        wire_dtype: str | None,
        timeout: float,
        snapshot: Snapshot,
        seconds: float,
        patience: float = 0.0,
        shares: bool = True,
        key: Key = NO_SECRET,
    ) -> None:
        self.store, self.name, self.wire_dtype, self.key = store, name, wire_dtype, key
        self.seldom = RareWarnings()
        self.shares = shares and shares_memory()
        self.sent = self.received = 0
        self.incarnation = secrets.token_hex(4)
        self._listener, self._chief, self.timeout = listener, chief, timeout
        self._snapshot, self._seconds, self._patience = snapshot, seconds, patience
        store.counter = snapshot.counter()
        self._runtime = store.runtime
        self._ended = self._runtime.event()
        self._failure: BaseException | None = None
        self._cut_off: TaskLostError | None = None  # why the job has ended too early
        self._interrupted: BaseException | None = None
        self._connections: set[Served] = set()
        self._began = self._chief_seen = self._runtime.now()
        self._chiefs = self._reign = 0
        self._lock = self._runtime.lock()
        self._snapshot_lock = self._runtime.lock()  # of the snapshot
        self._written = -1
        self.replica = Replica(self)

    def serve(self) -> None:
        """Return when the job has ended; `TaskLostError` when the chief stays away, or has failed.

        Raises too what went wrong in serving a task.
        """
        keeper = self._runtime.start(self._keep_snapshots, "spartito-snapshot", daemon=False)
        acceptor = self._accept()
        try:
            while not self._ended.is_set():
                self._wait()
            if self._failure is not None:
                raise self._failure
            self.replica.close()
            self._linger()
        finally:
            self._ended.set()
            self.replica.close()
            keeper.join()
            if acceptor is not None:
                acceptor.close()
            for connection in list(self._connections):
                connection.close()
        self._snapshot.remove()
        if self._cut_off is not None:
            raise self._cut_off

    def _wait(self) -> None:
        """A while; a Ctrl-C that reaches all tasks lets the chief fetch the values first."""
        try:
            beat(self.store.version, SERVE)
            if not self._ended.wait(LOOK_SECONDS):
                self._look_for_chief()
        except KeyboardInterrupt as stop:
            if self._interrupted is not None or not self.ends_with_chief(stop):
                raise
            note("%s ends when its chief ends, or when it is interrupted again", self.name)
        if self._interrupted is not None and not self._chiefs and not self._ended.is_set():
            raise self._interrupted

    def ends_with_chief(self, stop: BaseException) -> bool:
        """Whether a chief is connected: if it leaves without an end, `serve` raises ``stop``."""
        if self._chiefs:
            self._interrupted = stop
        return self._chiefs > 0

    def end(self, why: str = "") -> None:
        """The job has ended; ``why`` it did before its training was done, where it did."""
        if why:
            self._cut_off = TaskLostError(*why.split("\n  ", 1))
            with self.store.lock:
                self.store.fail(self._cut_off)
        self._ended.set()

    def fail(self, failure: BaseException) -> None:
        """Serving a task failed in a way that is not the task's fault."""
        self._failure = self._failure or failure
        self.end()

    def record(self) -> dict[str, Any]:
        """What it did, for the run's records."""
        store = self.store
        return {
            "seconds": self._runtime.now() - self._began,
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "examples": store.examples,
            "updates": store.version,
            "pushes": store.pushes,
            "work_items": store.work_items,
            "staleness": store.staleness.to_dict(),
            "duplicates": store.duplicates,
            "dropped": store.dropped,
            "refused": store.refused,
            "largest_gradient": store.norms.largest,
            "lost": store.lost,
        }

    def greet(self, hello: Hello) -> Refused | None:
        """Whether a task may come in; `TaskLostError` if what it had given us is lost."""
        store = self.store
        mine = {"model": store.shard.layout.digest, "rules": str(store.rules)}
        its = {"model": hello.digest, "rules": hello.rules}
        for what, value in mine.items():
            if its[what] != value:
                return Refused(
                    f"{hello.task} has {what} {its[what]}, {self.name} has {value}",
                    "All tasks must run the same script: the model, the optimizer's groups and "
                    "the strategy's options must be equal.",
                )
        if not -1 <= hello.worker < store.rules.workers:
            who = store.rules.name_of(hello.worker)
            return Refused(f"{hello.task} is {who} of {store.rules.workers}", "")
        if hello.chief:
            try:
                self.heard_from_chief(hello.generation)
            except TaskLostError as error:
                return Refused(str(error), "", lost=True)
        if hello.errand is not Errand.SERVE:
            return None
        with store.lock:
            if not store.ready and store.rules.replicas == 1:
                self._restore(hello.job)
            if not store.ready and hello.loaded and store.primary:
                raise self._snapshot.missing(hello.job)
            if store.ready and store.job != hello.job and not hello.chief:
                return Refused(
                    f"{hello.task} is of job {hello.job}, {self.name} serves {store.job}",
                    "Two jobs have the same address: choose other ports.",
                )
        return None

    def restore(self, job: str) -> bool:
        """Go on from the snapshot; False where there is none of this job."""
        self.store.ready = False
        self._restore(job)
        return self.store.ready

    def reach(self, address: str) -> Channel:
        """A connection to another server, both ends of which know the secret."""
        host, port = split_address(address)
        sock = reach(host, port, address, COPY_SECONDS, key=self.key, purpose=PURPOSE)
        return Wire(sock, Reply, timeout=COPY_SECONDS)

    def disconnect(self) -> None:
        """Close the connections of those who are served."""
        with self._lock:
            served = [connection for connection in self._connections if connection.serves]
        for connection in served:
            connection.close()

    def came(self, connection: Served, chief: bool) -> None:
        """A task was let in."""
        with self._lock:
            self._connections.add(connection)
            self._chiefs += chief

    def heard_from_chief(self, reign: int) -> None:
        """The ``reign``-th process that is the chief said something; the last of them counts.

        Raises `TaskLostError` for an earlier one, which was frozen when another began.
        """
        with self._lock:
            if reign < self._reign:
                raise TaskLostError(
                    "another process has replaced this chief",
                    "It was given up, or two tasks are the chief.",
                )
            self._reign = reign
        self._chief_seen = self._runtime.now()

    def left(self, connection: Served, chief: bool) -> None:
        """A task is gone."""
        with self._lock:
            self._connections.discard(connection)
            self.sent += connection.sent
            self.received += connection.received
            self._chiefs -= chief

    def snapshot(self) -> None:
        """Write what a restarted server goes on from; `UserError` where there is no space."""
        with self._snapshot_lock:
            self._written = self._snapshot.write(self.store)

    def keep(self) -> None:
        """Write a snapshot of what is there now; a warning where there is no space for it."""
        if self.store.ready and self.store.version != self._written:
            try:
                self.snapshot()
            except UserError as error:  # the next one may find space again
                warn("%s", error)

    def _restore(self, job: str) -> None:
        """Go on from the snapshot, if there is one of this job."""
        if not self._snapshot.restore(self.store, job):
            return
        self._written = self.store.version
        note(
            "%s goes on from its snapshot of update %d; updates lost so far: %d",
            self.name, self.store.version, self.store.lost,
        )  # fmt: skip

    def _keep_snapshots(self) -> None:
        """Early at first: before the first snapshot a server that dies loses all that was done."""
        for pause in pauses(self._seconds):
            if self._ended.wait(pause):
                return
            self.keep()

    def _look_for_chief(self) -> None:
        away = self._runtime.now() - self._chief_seen
        left = self.store.ready and not self._chiefs
        limit = max(self.timeout * (AWAY if left else 1), self._patience)
        if away <= limit or self._ended.is_set():
            return
        lost = TaskLostError(
            f"{self._chief} {'is gone' if left else 'was not heard of'}: "
            f"{self.name} waited {away:.0f} s for it",
            "Look at its last lines. A parameter server cannot go on without the chief.",
        )
        with self.store.lock:
            self.store.fail(lost)
        self._linger()  # those who wait here hear of it
        raise lost

    def serve_task(self, wire: Channel) -> None:
        """Serve the task at the other end of ``wire`` until it leaves."""
        connection = Connection(self, wire)
        del wire  # the connection may go on by another one
        connection.run()

    def _accept(self) -> Acceptor | None:
        if self._listener is None:  # a simulation's
            return None
        return Acceptor(self._listener, self._enter, key=self.key, purpose=PURPOSE, name=self.name)

    def _enter(self, sock: Secured) -> None:
        keep_alive(sock, LONG_SILENCE)
        try:
            wire: list[Channel] = [Wire(sock, Request, timeout=GREETING_SECONDS)]
        except OSError:
            sock.close()  # it is gone already
        else:
            self.serve_task(wire.pop())

    def _linger(self) -> None:
        limit = self._runtime.now() + min(LINGER_SECONDS, self.timeout)
        while self._connections and self._runtime.now() < limit:
            self._runtime.sleep(0.02)
