"""Keeps a store for all who know the job's secret: a thread for each of them."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field

from spartito.cluster.store.journal import Journal
from spartito.cluster.store.protocol import PURPOSE, Gather, Reply, Request
from spartito.cluster.store.values import Values
from spartito.notes import RareWarnings, shown
from spartito.wire.acceptor import Acceptor
from spartito.wire.frames import ProtocolError, TooLongError, Wire
from spartito.wire.limits import LONG_HEADER
from spartito.wire.secret import Key
from spartito.wire.streams import Connection, ForgedError, Socket, keep_alive, peer_host

MOST_SECONDS = 3600.0
"""Seconds that a wait may take."""
UNREAD_SECONDS = 10.0
"""Seconds in which a client has to take a reply, or it is disconnected."""
LOOK_SECONDS = 2.0
"""Seconds of a wait between two looks whether the client is still there."""


@dataclass(slots=True, eq=False)
class Caller:
    """A client, and the reply to its wait once that is over."""

    wire: Wire
    address: str
    reply: Reply | None = None
    replied: threading.Event = field(default_factory=threading.Event)


class Server:
    """A store that is kept in this process until `close`.

    Args:
        listener: A socket that listens; the server closes it.
        key: The job's.
        name: What its task is called in warnings.
        journal: What an earlier store was told, and this one is; None: it begins empty.
    """

    def __init__(
        self,
        listener: Socket,
        key: Key,
        name: str = "the store",
        journal: Journal | None = None,
    ) -> None:
        self._name = name
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._values: Values[Caller | None] = Values()
        self._journal = journal
        for request in journal.requests() if journal is not None else ():
            self._values.apply(request, None)
        self._callers: set[Caller] = set()
        self._closed = False
        # The last who holds a store may be collected anywhere, also where the lock is held.
        self._lock = threading.RLock()
        self._warnings = RareWarnings()
        self._process = os.getpid()
        self._acceptor = Acceptor(listener, self._serve, key=key, purpose=PURPOSE, name=name)

    def close(self) -> None:
        """Serve no more. May be called again."""
        if os.getpid() != self._process:  # a fork has none of it
            return
        self._acceptor.close()
        with self._lock:
            self._closed = True
            callers = list(self._callers)
        for caller in callers:
            caller.wire.close()

    def _serve(self, connection: Connection) -> None:
        """Reply to a client until it leaves."""
        keep_alive(connection)
        try:
            address = peer_host(connection)
            wire = Wire(connection, Request)
            wire.header_limit = LONG_HEADER
            wire.set_timeouts(send=UNREAD_SECONDS, receive=None)
        except OSError:
            connection.close()  # it is gone already
            return
        caller = Caller(wire, address)
        with self._lock:
            if self._closed:
                wire.close()
                return
            self._callers.add(caller)
        try:
            while True:
                self._reply(wire, self._done(caller, wire.receive()))
        except ProtocolError as error:
            self._warn(caller, error)
        except OSError as error:
            if isinstance(error.__cause__, ForgedError):
                self._warn(caller, error.__cause__)
        finally:
            with self._lock:
                self._callers.discard(caller)
                self._values.leave(caller)
                self._wake()
            wire.close()

    def _done(self, caller: Caller, request: Request) -> Reply:
        """Do what is asked, and wait where that is asked."""
        with self._lock:
            reply = self._values.apply(request, caller)
            if self._journal is not None and reply is not None and not reply.refused:
                self._journal.write(request)
            self._wake()
        if reply is None:
            assert isinstance(request, Gather)
            reply = self._awaited(caller, time.monotonic() + min(request.seconds, MOST_SECONDS))
        return reply

    def _awaited(self, caller: Caller, end: float) -> Reply:
        """The reply to a client that waits for values until ``end``."""
        while not caller.replied.wait(max(0.0, min(LOOK_SECONDS, end - time.monotonic()))):
            if caller.wire.ready(0.0):
                raise ConnectionResetError("it left, or asks on while it waits")
            if time.monotonic() >= end:
                with self._lock:
                    caller.reply = caller.reply or self._values.give_up(caller)
                break
        caller.replied.clear()
        reply, caller.reply = caller.reply, None
        assert reply is not None
        return reply

    def _wake(self) -> None:
        """Hand out the replies to those whose wait is over."""
        while ready := self._values.ready():
            for caller, reply in ready:
                assert caller is not None
                caller.reply = reply
                caller.replied.set()

    def _reply(self, wire: Wire, reply: Reply) -> None:
        try:
            wire.send(reply)
        except TooLongError as error:
            wire.send(Reply(refused=str(error)))

    def _warn(self, caller: Caller, why: Exception) -> None:
        text = why.strerror if isinstance(why, OSError) else why
        self._warnings.warn("%s refused %s: %s", self._name, shown(caller.address), text)
