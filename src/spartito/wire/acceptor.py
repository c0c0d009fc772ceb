"""Accepts connections of peers that know the job's secret; survives floods of unknown ones."""

from __future__ import annotations

import resource
import select
import threading
import time
from collections.abc import Callable

from spartito.forks import keep_from_forks
from spartito.notes import RareWarnings, shown
from spartito.wire.handshake import UnknownPeerError, challenge
from spartito.wire.limits import GREETING_SECONDS, MOST_UNKNOWN
from spartito.wire.secret import Key
from spartito.wire.streams import Connection, Socket, disconnect, send_at_once

LOOK_SECONDS = 1.0
"""Seconds between two looks whether it is closed, where closing wakes nobody."""

REST_SECONDS = 0.05
"""Seconds to wait when the system has no descriptor or thread for a caller."""


class Acceptor:
    """Accepts callers at a listening socket until `close`.

    Each caller has a thread of its own. Before it has authenticated it takes one descriptor and
    one thread, for `GREETING_SECONDS` at most. When too many are unknown the oldest is
    disconnected: a task is known after two round trips.

    Args:
        listener: The socket.
        accepted: Gets the blocking connection of each caller that knows ``key``, in its thread;
            owns it from then on.
        key: The job's secret.
        purpose: What the connections are for, part of the handshake.
        name: What this task is called in warnings.
        refused: Gets the address of an unknown peer and the reason; None warns.
    """

    def __init__(
        self,
        listener: Socket,
        accepted: Callable[[Connection], None],
        *,
        key: Key,
        purpose: str,
        name: str,
        refused: Callable[[str, UnknownPeerError], None] | None = None,
    ) -> None:
        self._listener, self._accepted, self._name = listener, accepted, name
        self._refused = refused or self._warn
        self._key, self._purpose = key, purpose
        self._most = min(MOST_UNKNOWN, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._unknown: dict[Socket, str] = {}  # in the order of their coming
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._warnings = RareWarnings()
        listener.settimeout(None)
        keep_from_forks(listener.fileno())
        self._thread = threading.Thread(target=self._accept, name="spartito-acceptor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and disconnect those who are not known. May be called again."""
        self._closed.set()
        disconnect(self._listener)  # wakes the thread
        self._listener.close()
        while self._evict():
            pass
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)  # where a shutdown wakes nobody it ends with the process

    def _accept(self) -> None:
        poller = select.poll()  # accept() fails without a descriptor, though nobody is there
        poller.register(self._listener)
        while not self._closed.is_set():
            if not poller.poll(LOOK_SECONDS * 1000):
                continue
            try:
                caller, address = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                self._warnings.warn("%s cannot accept a connection: %s", self._name, error.strerror)
                time.sleep(REST_SECONDS)  # unknown peers are gone soon, and a task may leave
                continue
            self._begin(caller, str(address[0]) if address else "")

    def _begin(self, caller: Socket, address: str) -> None:
        while len(self._unknown) >= self._most and self._evict():
            self._warnings.warn(
                "%s has too many callers: unknown peers are disconnected", self._name
            )
        with self._lock:
            self._unknown[caller] = address
        thread = threading.Thread(
            target=self._greet, args=(caller, address), name="spartito-caller", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads
            self._warnings.warn("%s cannot accept a connection: %s", self._name, error)
            self._forget(caller)
            caller.close()
            time.sleep(REST_SECONDS)

    def _greet(self, caller: Socket, address: str) -> None:
        try:
            send_at_once(caller)
            end = time.monotonic() + GREETING_SECONDS
            connection = challenge(caller, self._key, self._purpose, end)
        except UnknownPeerError as error:
            self._refused(shown(address), error)
        except OSError:
            pass  # it left, or said nothing: a port scan, a health check
        else:
            if self._forget(caller):
                self._accepted(connection)
                return
        self._forget(caller)
        caller.close()

    def _warn(self, address: str, why: UnknownPeerError) -> None:
        self._warnings.warn("%s refused %s: %s", self._name, address, why)

    def _forget(self, caller: Socket) -> bool:
        """The caller is unknown no more; False if it was disconnected meanwhile."""
        with self._lock:
            return self._unknown.pop(caller, None) is not None

    def _evict(self) -> bool:
        """Disconnect the caller that is unknown for the longest time; False if none is."""
        with self._lock:
            if not self._unknown:
                return False
            caller = next(iter(self._unknown))
            del self._unknown[caller]
        disconnect(caller)  # its thread closes it
        return True
