"""A parameter server: it listens, a thread per task serves, and a snapshot is kept."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch

from spartito.collectives.door import Door
from spartito.collectives.shared_memory import supported
from spartito.errors import SpartitoError, TaskLostError
from spartito.log import Seldom, note, warn
from spartito.ps.connection import Connection
from spartito.ps.host import Talk
from spartito.ps.messages import Hello, Refused
from spartito.ps.store import Store
from spartito.ps.tally import Tally
from spartito.storage import load_tensors, save_tensors

PURPOSE = "ps"
LINGER_SECONDS = 30.0  # for tasks that still look at values when the job has ended
LOOK_SECONDS = 0.5
AWAY = 0.5  # of the time limit: who waits here is told of a lost chief before it gives us up


class Server:
    """Serves a `Store` until the chief says that the job has ended.

    ``name`` and ``chief`` are tasks' names for messages; ``timeout`` is how long the chief may
    be silent, in seconds, and half of it how long its connection may be broken. ``snapshots`` is a
    file, written every ``seconds``; beside it lies the tally of updates. Who comes must know
    ``key``, the job's secret.
    """

    def __init__(
        self,
        store: Store,
        listener: socket.socket,
        *,
        name: str,
        chief: str,
        wire_dtype: str | None,
        timeout: float,
        snapshots: Path,
        seconds: float,
        shares: bool = True,
        key: bytes = b"",
    ) -> None:
        self.store, self.name, self.wire_dtype, self.key = store, name, wire_dtype, key
        self.seldom = Seldom()
        self.shares = shares and supported()
        self.sent = self.received = 0
        self.life = secrets.token_hex(4)
        self._listener, self._chief, self.timeout = listener, chief, timeout
        self._snapshots, self._seconds = snapshots, seconds
        self._tally = snapshots.with_suffix(".tally")
        store.tally = Tally(self._tally)
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._connections: set[Talk] = set()
        self._began = self._chief_seen = time.monotonic()
        self._chiefs = 0
        self._guard = threading.Lock()
        self._pen = threading.Lock()  # of the snapshot
        self._written = -1

    def serve(self) -> None:
        """Return when the job has ended; `TaskLostError` when the chief stays away.

        Raises too what went wrong in serving a task.
        """
        keeper = threading.Thread(target=self._keep_snapshots, name="spartito-snapshot")
        keeper.start()
        door = Door(self._listener, self._enter, key=self.key, purpose=PURPOSE, name=self.name)
        try:
            while not self._ended.wait(LOOK_SECONDS):
                self._look_for_chief()
            if self._failure is not None:
                raise self._failure
            self._linger()
        finally:
            self._ended.set()
            keeper.join()
            door.close()
            for connection in list(self._connections):
                connection.close()
        for path in (self._snapshots, self._tally):
            path.unlink(missing_ok=True)

    def end(self) -> None:
        """The job has ended."""
        self._ended.set()

    def fail(self, failure: BaseException) -> None:
        """Serving a task went wrong in a way that is not the task's fault."""
        self._failure = self._failure or failure
        self.end()

    def record(self) -> dict[str, Any]:
        """What it did, for the run's records."""
        store = self.store
        return {
            "seconds": time.monotonic() - self._began,
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "examples": store.examples,
            "updates": store.version,
            "pushes": store.pushes,
            "pieces": store.pieces,
            "staleness": store.staleness.to_dict(),
            "duplicates": store.duplicates,
            "dropped": store.dropped,
            "refused": store.refused,
            "largest_gradient": store.sizes.largest,
            "lost": store.lost,
        }

    def greet(self, hello: Hello) -> Refused | None:
        """Whether a task may come in."""
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
            return Refused(f"{hello.task} is worker {hello.worker} of {store.rules.workers}", "")
        with store.turn:
            if not store.ready:
                self._restore(hello.job)
            if store.ready and store.job != hello.job and not hello.chief:
                return Refused(
                    f"{hello.task} is of job {hello.job}, {self.name} serves {store.job}",
                    "Two jobs have the same address: choose other ports.",
                )
        return None

    def came(self, connection: Talk, chief: bool) -> None:
        """A task was let in."""
        with self._guard:
            self._connections.add(connection)
            self._chiefs += chief
        if chief:
            self.hear_chief()

    def hear_chief(self) -> None:
        """The chief is there: it said something."""
        self._chief_seen = time.monotonic()

    def left(self, connection: Talk, chief: bool) -> None:
        """A task is gone."""
        with self._guard:
            self._connections.discard(connection)
            self.sent += connection.sent
            self.received += connection.received
            self._chiefs -= chief

    def snapshot(self) -> None:
        """Write what a restarted server goes on from."""
        with self._pen:
            with self.store.turn:
                tensors, about = self.store.dump()
            text = json.dumps(about).encode()
            tensors["about"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._snapshots.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._snapshots.with_suffix(".new")
            save_tensors(tensors, fresh)
            os.replace(fresh, self._snapshots)
            self._written = about["counts"][0]

    def _restore(self, job: str) -> None:
        """Go on from the snapshot, if there is one of this job."""
        if not self._snapshots.exists():
            return
        tensors = load_tensors(self._snapshots)
        about: dict[str, Any] = json.loads(tensors.pop("about").numpy().tobytes())
        if about["job"] != job or about["digest"] != self.store.shard.layout.digest:
            return
        self.store.restore(tensors, about)
        self._written = self.store.version
        note(
            "%s goes on from its snapshot of update %d; updates lost so far: %d",
            self.name, self.store.version, self.store.lost,
        )  # fmt: skip

    def _keep_snapshots(self) -> None:
        while not self._ended.wait(self._seconds):
            if self.store.ready and self.store.version != self._written:
                try:
                    self.snapshot()
                except (OSError, SpartitoError) as error:  # the next one may find room again
                    warn("%s cannot write its snapshot: %s", self.name, error)

    def _look_for_chief(self) -> None:
        away = time.monotonic() - self._chief_seen
        left = self.store.ready and not self._chiefs
        if away <= self.timeout * (AWAY if left else 1) or self._ended.is_set():
            return
        lost = TaskLostError(
            f"{self._chief} {'is gone' if left else 'was not heard of'}: "
            f"{self.name} waited {away:.0f} s for it",
            "Look at its last lines. A parameter server cannot go on without the chief.",
        )
        with self.store.turn:
            self.store.fail(lost)
        self._linger()  # those who wait here hear of it
        raise lost

    def _enter(self, sock: socket.socket) -> None:
        try:
            connection = Connection(self, sock)
        except OSError:
            sock.close()  # it is gone already
        else:
            connection.run()

    def _linger(self) -> None:
        limit = time.monotonic() + min(LINGER_SECONDS, self.timeout)
        while self._connections and time.monotonic() < limit:
            time.sleep(0.02)
