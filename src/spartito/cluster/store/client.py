"""A task's side of the store: each call has a limit, and any thread may make it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import copy

from spartito.cluster.store.protocol import (
    PURPOSE,
    RETIRED,
    Add,
    Delete,
    Gather,
    Hold,
    Keys,
    Reply,
    Request,
    Retire,
    Set,
    Swap,
)
from spartito.errors import SpartitoError
from spartito.wire.dialing import connect
from spartito.wire.frames import ProtocolError, TooLongError, Wire
from spartito.wire.handshake import prove
from spartito.wire.limits import LONG_HEADER
from spartito.wire.secret import Key
from spartito.wire.streams import keep_alive


class StoreError(SpartitoError):
    """The store did not do what it was asked."""


class StoreGoneError(StoreError):
    """The store does not reply: its process is gone, frozen, or out of reach."""


class StoreSilentError(StoreGoneError):
    """The store has not replied within so many ``seconds``: frozen, or out of reach."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(f"{name} did not reply within {seconds:g} s")
        self.seconds = seconds


class ValueTimeoutError(StoreError):
    """The store replies, but nobody has given it the value within the limit."""


class FencedError(StoreError):
    """The keys are of a generation that is over: the others have gone on."""


class Held:
    """A connection to a store, as long as which a key has its value."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def outlast(self) -> None:
        """Return when the store closes it, or when `close` does."""
        self._wire.timeout = None
        with suppress(OSError, ProtocolError):
            self._wire.receive()

    def close(self) -> None:
        """End it, also for a thread that waits in `outlast`. May be called again."""
        self._wire.close()

    __del__ = close


class Store:
    """The keys of a store below a prefix.

    Every call ends: with its result, or after ``limit`` seconds (beyond those that it is told to
    wait for values) with `StoreGoneError`. All of them raise `FencedError` where the prefix was
    retired, and `UserError` where what listens there is no store, of another release, or of
    another secret.

    Args:
        host: Where it is.
        port: The same.
        key: The job's.
        limit: Seconds in which the store has to reply.
        name: What errors call it.
        keeps: What is to live as long as this store or one made of it does.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: Key,
        limit: float,
        name: str = "the store",
        keeps: object = None,
    ) -> None:
        self._host, self._port, self._key = host, port, key
        self._limit, self._name = limit, name
        self._prefix, self._keeps = "", keeps
        self._idle: list[Wire] = []
        self._lock = threading.Lock()

    def under(self, prefix: str) -> Store:
        """The keys below ``prefix`` of these."""
        made = copy(self)
        made._prefix = f"{self._prefix}{prefix}/"
        return made

    def within(self, limit: float) -> Store:
        """The same keys, where the store has to reply within ``limit`` seconds."""
        made = copy(self)
        made._limit = limit
        return made

    def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value."""
        self._ask(Set(self._prefix + key, value))

    def get(self, key: str, seconds: float | None = None) -> bytes:
        """The value of ``key``; waits for it.

        Raises:
            ValueTimeoutError: It has none after ``seconds``, by default the limit of the store.
        """
        seconds = self._limit if seconds is None else seconds
        found = self.gather([key], seconds)
        if not found:
            raise ValueTimeoutError(f"nobody has set {self._prefix + key!r} within {seconds:g} s")
        return found[key]

    def gather(self, keys: Iterable[str], seconds: float = 0.0) -> dict[str, bytes]:
        """The values of ``keys``, once all have one, or of those that do after ``seconds``."""
        names = tuple(self._prefix + key for key in keys)
        return self._found(self._ask(Gather(names, seconds), seconds))

    def add(self, key: str, amount: int) -> int:
        """Add to the number at ``key``, which begins as 0; returns what it is then."""
        return int(self._found(self._ask(Add(self._prefix + key, amount)))[key])

    def swap(self, key: str, expected: bytes | None, new: bytes) -> bytes | None:
        """Give ``key`` the value ``new`` where it has the one ``expected``, None for none.

        Returns:
            Its value then, ``new`` where it was done.
        """
        found = self._found(self._ask(Swap(self._prefix + key, expected, new)))
        return found.get(key)

    def delete(self, key: str) -> bool:
        """Forget ``key``; returns whether it had a value."""
        return bool(self._ask(Delete(self._prefix + key)).found)

    def keys(self, prefix: str = "") -> dict[str, bytes]:
        """The values of all keys that begin with ``prefix``."""
        return self._found(self._ask(Keys(self._prefix + prefix)))

    def hold(self, key: str) -> Held:
        """Give ``key`` an empty value as long as the connection that is returned stays open."""
        end = time.monotonic() + self._limit
        with self._meaning(self._limit):
            wire = self._connected(end, watched=True)
            try:
                _ask(wire, Hold(self._prefix + key, b""), end)
            except BaseException:
                wire.close()
                raise
        return Held(wire)

    def retire(self, prefix: str) -> None:
        """Forget all below ``prefix``, and refuse it to everybody from now on."""
        self._ask(Retire(f"{self._prefix}{prefix}/"))

    def close(self) -> None:
        """Close the connections; a later call makes new ones."""
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()

    def _found(self, reply: Reply) -> dict[str, bytes]:
        cut = len(self._prefix)
        return {key[cut:]: value for key, value in reply.found.items()}

    def _ask(self, request: Request, seconds: float = 0.0) -> Reply:
        end = time.monotonic() + seconds + self._limit
        with self._meaning(seconds + self._limit):
            wire = self._take(end)
            try:
                reply = _ask(wire, request, end)
            except BaseException:
                wire.close()
                raise
        with self._lock:
            self._idle.append(wire)
        if reply.refused == RETIRED:
            raise FencedError(
                "the others have gone on without this task",
                "It was out of reach, or stopped, for too long: see their last lines.",
            )
        if reply.refused:
            raise StoreError(f"{self._name} refused a request: {reply.refused}")
        return reply

    def _take(self, end: float) -> Wire:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._connected(end)

    def _connected(self, end: float, watched: bool = False) -> Wire:
        """A new connection; ``watched``: it ends soon after the store is out of reach."""
        below = connect(self._host, self._port, end - time.monotonic())
        try:
            if watched:
                keep_alive(below)
            wire = Wire(prove(below, self._name, self._key, PURPOSE, end), Reply)
        except BaseException:
            below.close()
            raise
        wire.header_limit = LONG_HEADER
        return wire

    @contextmanager
    def _meaning(self, seconds: float) -> Iterator[None]:
        """What a user is told where the store does not reply within so many ``seconds``."""
        try:
            yield
        except TooLongError as error:
            raise StoreError(str(error)) from error
        except TimeoutError as error:
            raise StoreSilentError(self._name, seconds) from error
        except (OSError, ProtocolError) as error:
            raise StoreGoneError(f"{self._name} is gone") from error


def _ask(wire: Wire, request: Request, end: float) -> Reply:
    """The reply to ``request``, which has to come until ``end`` of `time.monotonic`."""
    wire.timeout = max(0.001, end - time.monotonic())
    wire.send(request)
    reply: Reply = wire.receive()
    return reply
