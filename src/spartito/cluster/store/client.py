"""A task's side of the store: each call has a limit, and any thread may make it."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy

from spartito.cluster.store.protocol import (
    HEAD,
    HELLO,
    MAGIC,
    RETIRED,
    Add,
    Delete,
    Gather,
    Hold,
    Keys,
    OtherSecretError,
    ProtocolError,
    Reply,
    Request,
    Retire,
    Set,
    Swap,
    hello,
    reply_of,
    seals,
    size_of,
)
from spartito.errors import SpartitoError, UserError
from spartito.forks import keep_from_forks
from spartito.names import ENV_TLS
from spartito.wire.keepalive import look_after
from spartito.wire.secret import Key
from spartito.wire.tls import ALERT, Encrypted


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


class StoreSecretError(UserError):
    """The store does not know the secret of this task."""


class OtherStoreError(UserError):
    """What listens there is no store."""


class Connection:
    """One connection to a store, for one request at a time.

    Owns the socket ``connected``. Both ends have to say their first words until ``end`` of
    `time.monotonic`.
    """

    def __init__(self, connected: socket.socket, key: Key, end: float) -> None:
        self._socket: socket.socket | Encrypted = connected
        keep_from_forks(connected.fileno())
        own = hello()
        try:
            if key.encrypts:
                self._socket = Encrypted(connected, key.secret, listens=False, end=end)
            self._send(own, end)
            magic = self._receive(len(MAGIC), end)
            if magic == ALERT[: len(MAGIC)]:
                raise OtherStoreError("encrypts what it sends, and this task does not")
            if magic != MAGIC:
                raise OtherStoreError("is no store of Spartito: another program replies there")
            theirs = magic + self._receive(HELLO - len(MAGIC), end)
        except BaseException:
            connected.close()
            raise
        self._out, self._in = seals(key.secret, own, theirs)

    def ask(self, request: Request, end: float) -> Reply:
        """The reply to ``request``, which has to come until ``end`` of `time.monotonic`."""
        self._send(self._out.close(request), end)
        head = self._receive(HEAD, end)
        body = self._receive(size_of(head), end)
        return reply_of(self._in.open(head, body))

    def outlast(self) -> None:
        """Return when the store closes it, or when `end` does."""
        self._socket.settimeout(None)
        with suppress(OSError):
            self._socket.recv(1)

    def end(self) -> None:
        """End it, also for a thread that waits in `outlast`."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    __del__ = close

    def _send(self, data: bytes, end: float) -> None:
        self._socket.settimeout(max(0.001, end - time.monotonic()))
        self._socket.sendall(data)

    def _receive(self, size: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(0.001, end - time.monotonic()))
            more = self._socket.recv(size - len(data))
            if not more:
                raise ConnectionResetError("it closed the connection")
            data += more
        return bytes(data)


class Store:
    """The keys of a store below a prefix.

    Every call ends: with its result, or after ``limit`` seconds (beyond those that it is told to
    wait for values) with `StoreGoneError`. All of them raise `FencedError` where the prefix was
    retired, and `StoreSecretError` where the store knows another secret.

    Args:
        connect: Makes a connected socket within the seconds that it gets, or raises `OSError`.
        key: The job's.
        limit: Seconds in which the store has to reply.
        name: What errors call it.
        keeps: What is to live as long as this store or one made of it does.
    """

    def __init__(
        self,
        connect: Callable[[float], socket.socket],
        key: Key,
        limit: float,
        name: str = "the store",
        keeps: object = None,
    ) -> None:
        self._connect, self._key, self._limit, self._name = connect, key, limit, name
        self._prefix, self._keeps = "", keeps
        self._idle: list[Connection] = []
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

    def hold(self, key: str) -> Connection:
        """Give ``key`` an empty value as long as the connection that is returned stays open."""
        end = time.monotonic() + self._limit
        try:
            connected = self._connect(self._limit)
            look_after(connected)
            connection = Connection(connected, self._key, end)
            connection.ask(Hold(self._prefix + key, b""), end)
        except Exception as error:
            raise self._meaning(error, 0.0) from error
        return connection

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
        connection = self._take(end)
        try:
            reply = connection.ask(request, end)
        except BaseException as error:
            connection.close()
            raise self._meaning(error, seconds) from error
        with self._lock:
            self._idle.append(connection)
        if reply.refused == RETIRED:
            raise FencedError(
                "the others have gone on without this task",
                "It was out of reach, or stopped, for too long: see their last lines.",
            )
        if reply.refused:
            raise StoreError(f"{self._name} refused a request: {reply.refused}")
        return reply

    def _take(self, end: float) -> Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        seconds = max(0.01, end - time.monotonic())
        try:
            return Connection(self._connect(seconds), self._key, end)
        except (OSError, OtherStoreError) as error:
            raise self._meaning(error, 0.0) from error

    def _meaning(self, error: BaseException, seconds: float) -> BaseException:
        """What a user is told of it."""
        match error:
            case OtherSecretError() | ssl.SSLCertVerificationError():
                return StoreSecretError(
                    f"{self._name} does not know the secret of this task: it is of another job, "
                    "was given another SPARTITO_SECRET, or runs another Spartito",
                    "Give all tasks the same SPARTITO_SECRET or SPARTITO_SECRET_FILE, or none; "
                    "two jobs need different ports.",
                )
            case OtherStoreError():
                return OtherStoreError(
                    f"{self._name} {error}",
                    f"Correct the address, or end that program; all tasks need the same {ENV_TLS}.",
                )
            case ssl.SSLError():
                return self._meaning(
                    OtherStoreError("does not encrypt what it sends, or is no store"), seconds
                )
            case TimeoutError():
                return StoreSilentError(self._name, seconds + self._limit)
            case OSError() | ProtocolError():
                return StoreGoneError(f"{self._name} is gone")
        return error
