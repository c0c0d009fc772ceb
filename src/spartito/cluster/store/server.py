"""Keeps a store, in one thread, for all who know the job's secret."""

from __future__ import annotations

import os
import resource
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from spartito.cluster.store.journal import Journal
from spartito.cluster.store.protocol import (
    HEAD,
    HELLO,
    MAGIC,
    UNKNOWN,
    Gather,
    OtherSecretError,
    ProtocolError,
    Reply,
    Request,
    Seal,
    TooLongError,
    hello,
    request_of,
    seals,
    size_of,
)
from spartito.cluster.store.values import Values
from spartito.errors import SpartitoError
from spartito.forks import keep_from_forks
from spartito.log import RareWarnings, shown
from spartito.names import ENV_TLS
from spartito.wire.keepalive import look_after
from spartito.wire.secret import Key
from spartito.wire.tls import ALERT, Listening, speaks_another
from spartito.wire.tls import HELLO as TLS_HELLO

GREETING_SECONDS = 5.0
"""Seconds in which a caller has to show that it knows the secret, or it is disconnected."""
MOST_UNKNOWN = 64
"""Callers that have not shown it yet, at the same time; fewer with few descriptors."""
MOST_SECONDS = 3600.0
"""Seconds that a wait may take."""
MOST_UNSENT = 16 << 20
"""Bytes of replies that a client has not read: one that has more is disconnected."""
CHUNK = 1 << 16
REST_SECONDS = 0.05


class Plain:
    """The way of bytes that are said as they are."""

    def open(self, data: bytes) -> bytes:
        """What ``data`` says."""
        return data

    def close(self, data: bytes = b"") -> bytes:
        """What must be sent to say ``data``."""
        return data


@dataclass(slots=True, eq=False)
class Caller:
    """One connection, from its first byte on."""

    socket: socket.socket
    address: str
    way: Plain | Listening
    since: float
    own: bytes = b""
    seals: tuple[Seal, Seal] | None = None
    is_known: bool = False
    waits_until: float | None = None
    came: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class Server:
    """A store that is kept in this process until `close`.

    Args:
        listener: A socket that listens; the server closes it.
        key: The job's.
        name: What its task is called in warnings.
        refused: Gets the address of each caller that does not know the secret, and why.
        journal: What an earlier store was told, and this one is; None: it begins empty.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: Key,
        name: str = "the store",
        refused: Callable[[str, SpartitoError], None] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._listener, self._key, self._name = listener, key, name
        self._way()  # who comes first does not wait for certificates
        self._refused = refused or self._warn
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._values: Values[Caller | None] = Values()
        self._journal = journal
        for request in journal.requests() if journal is not None else ():
            self._values.apply(request, None)
        self._callers: set[Caller] = set()
        self._unknown: dict[Caller, None] = {}  # in the order of their coming
        self._waiting: set[Caller] = set()
        self._most = min(MOST_UNKNOWN, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._warnings = RareWarnings()
        self._process = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        for each in (listener, self._bell, self._rope):
            keep_from_forks(each.fileno())
        self._thread = threading.Thread(target=self._serve, name="spartito-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no more. May be called again."""
        if os.getpid() != self._process:  # a fork has none of it
            return
        with suppress(OSError):
            self._rope.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                for key, events in self._selector.select(self._seconds()):
                    if key.fileobj is self._bell:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._callers:
                        self._look(key.data, events)
                    self._end_ready()
                self._end_late(time.monotonic())
        finally:
            for caller in list(self._callers):
                self._forget(caller)
            self._selector.close()
            for each in (self._listener, self._bell, self._rope):
                each.close()

    def _seconds(self) -> float | None:
        """Until the next wait or greeting is over."""
        ends = [caller.waits_until for caller in self._waiting if caller.waits_until is not None]
        ends += [next(iter(self._unknown)).since + GREETING_SECONDS] if self._unknown else []
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._warnings.warn("%s cannot accept a connection: %s", self._name, error.strerror)
            self._evict()
            time.sleep(REST_SECONDS)
            return
        while len(self._unknown) >= self._most:
            self._warnings.warn(
                "%s has too many callers: unknown peers are disconnected", self._name
            )
            self._evict()
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        look_after(connection)
        keep_from_forks(connection.fileno())
        where = str(address[0]) if address else ""
        caller = Caller(connection, where, self._way(), time.monotonic())
        self._callers.add(caller)
        self._unknown[caller] = None
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _look(self, caller: Caller, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(caller)
            if events & selectors.EVENT_READ:
                data = caller.socket.recv(CHUNK)
                if not data:
                    raise ConnectionResetError
                self._open(caller, data)
                self._read(caller)
        except (BlockingIOError, InterruptedError):
            return
        except OtherSecretError as error:
            with suppress(OSError):
                caller.socket.send(caller.way.close(UNKNOWN))
            self._refused(shown(caller.address), error)
            self._forget(caller)
        except ProtocolError as error:
            self._refused(shown(caller.address), error)
            self._forget(caller)
        except OSError:
            self._forget(caller)

    def _way(self) -> Plain | Listening:
        return Listening(self._key.secret) if self._key.encrypts else Plain()

    def _open(self, caller: Caller, data: bytes) -> None:
        """Take in what came; reply where that is part of encrypting."""
        try:
            caller.came += caller.way.open(data)
        except ssl.SSLError as error:
            alert, why = caller.way.close(), "it does not know the job's secret"
            if speaks_another(error):  # OpenSSL says nothing to who is of no version of it
                alert, why = ALERT, "it does not encrypt, or is no task of Spartito"
            elif caller.is_known:
                why = "what came was changed on its way"
            with suppress(OSError):
                caller.socket.send(alert)
            raise ProtocolError(why) from error
        if reply := caller.way.close():
            caller.unsent += reply
            self._send(caller)

    def _read(self, caller: Caller) -> None:
        """Do what the bytes that came ask for."""
        if caller.seals is None:
            if caller.came.startswith(TLS_HELLO) and not self._key.encrypts:
                with suppress(OSError):
                    caller.socket.send(MAGIC * 2)  # from which it sees that we do not encrypt
                raise ProtocolError(f"it encrypts, and this task does not ({ENV_TLS})")
            if not caller.came.startswith(MAGIC[: len(caller.came)]):
                raise ProtocolError("it is no task of Spartito")
            if len(caller.came) < HELLO:
                return
            theirs, own = bytes(caller.came[:HELLO]), hello()
            del caller.came[:HELLO]
            caller.seals = seals(self._key.secret, theirs, own)
            caller.unsent += caller.way.close(own)
            self._send(caller)
        while caller.waits_until is None and len(caller.came) >= HEAD:
            head = bytes(caller.came[:HEAD])
            end = HEAD + size_of(head)
            if not caller.is_known and end > CHUNK:
                raise ProtocolError("its first frame is too long")
            if len(caller.came) < end:
                return
            body = caller.seals[0].open(head, bytes(caller.came[HEAD:end]))
            del caller.came[:end]
            caller.is_known = True
            self._unknown.pop(caller, None)
            self._do(caller, request_of(body), body)
        if caller.waits_until is not None and len(caller.came) > CHUNK:
            raise ProtocolError("it asks on while it waits")

    def _do(self, caller: Caller, request: Request, body: bytes) -> None:
        reply = self._values.apply(request, caller)
        if self._journal is not None and reply is not None and not reply.refused:
            self._journal.write(request, body)
        if reply is not None:
            self._reply(caller, reply)
        elif isinstance(request, Gather):
            caller.waits_until = time.monotonic() + min(request.seconds, MOST_SECONDS)
            self._waiting.add(caller)

    def _end_ready(self) -> None:
        while ready := self._values.ready():
            for caller, reply in ready:
                assert caller is not None
                self._end_wait(caller, reply)

    def _end_late(self, now: float) -> None:
        for caller in [one for one in self._waiting if (one.waits_until or 0.0) <= now]:
            self._end_wait(caller, self._values.give_up(caller))
        while self._unknown and next(iter(self._unknown)).since + GREETING_SECONDS <= now:
            self._evict()
        self._end_ready()

    def _end_wait(self, caller: Caller, reply: Reply) -> None:
        self._waiting.discard(caller)
        caller.waits_until = None
        try:
            self._reply(caller, reply)
            self._read(caller)  # what it asked meanwhile
        except (OSError, ProtocolError):
            self._forget(caller)

    def _reply(self, caller: Caller, reply: Reply) -> None:
        assert caller.seals is not None
        try:
            frame = caller.seals[1].close(reply)
        except TooLongError as error:
            frame = caller.seals[1].close(Reply(refused=str(error)))
        caller.unsent += caller.way.close(frame)
        self._send(caller)

    def _send(self, caller: Caller) -> None:
        with suppress(BlockingIOError):
            while caller.unsent:
                del caller.unsent[: caller.socket.send(caller.unsent)]
        if len(caller.unsent) > MOST_UNSENT:
            raise ConnectionAbortedError("it does not read")
        writes = selectors.EVENT_WRITE if caller.unsent else 0
        self._selector.modify(caller.socket, selectors.EVENT_READ | writes, caller)

    def _forget(self, caller: Caller) -> None:
        if caller not in self._callers:
            return
        self._callers.discard(caller)
        self._unknown.pop(caller, None)
        self._waiting.discard(caller)
        self._values.leave(caller)
        with suppress(OSError, KeyError, ValueError):
            self._selector.unregister(caller.socket)
        caller.socket.close()

    def _evict(self) -> None:
        """Disconnect the caller that is unknown for the longest time."""
        if self._unknown:
            self._forget(next(iter(self._unknown)))

    def _warn(self, address: str, why: SpartitoError) -> None:
        self._warnings.warn("%s refused %s: %s", self._name, address, why)
