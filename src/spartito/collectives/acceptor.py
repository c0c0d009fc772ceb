"""Where a task listens: it lets in who knows the job's secret, and outlives floods of strangers."""

from __future__ import annotations

import resource
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from spartito.collectives.handshake import GREETING_SECONDS, UnknownPeerError, challenge
from spartito.log import RareWarnings, shown

MOST_UNKNOWN = 64
"""Callers that have not proved yet who they are, at the same time; fewer with few descriptors."""

LOOK_SECONDS = 1.0
"""How often to look whether the door is closed, where closing it wakes nobody."""

REST_SECONDS = 0.05
"""How long to wait when the system has no descriptor or thread for a caller."""


class Acceptor:
    """Accepts callers at ``listener`` until `close`; ``enter`` gets those who know ``key``.

    Each has a thread of its own, in which ``enter`` is called with the connected, blocking
    socket, which is its own from then on. Before that a caller takes one descriptor and one
    thread, for `GREETING_SECONDS` at most. When too many are unknown the oldest is sent away: a
    task is known after two round trips. ``name`` is what this task is called in warnings; ``told``
    gets the address of a stranger and what is wrong with it, instead of a warning.
    """

    def __init__(
        self,
        listener: socket.socket,
        enter: Callable[[socket.socket], None],
        *,
        key: bytes,
        purpose: str,
        name: str,
        told: Callable[[str, UnknownPeerError], None] | None = None,
    ) -> None:
        self._listener, self._enter, self._name = listener, enter, name
        self._told = told or self._warn
        self._key, self._purpose = key, purpose
        self._most = min(MOST_UNKNOWN, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._unknown: dict[socket.socket, str] = {}  # in the order of their coming
        self._guard = threading.Lock()
        self._closed = threading.Event()
        self._seldom = RareWarnings()
        listener.settimeout(None)
        self._thread = threading.Thread(target=self._accept, name="spartito-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and hang up on those who are not known. May be called again."""
        self._closed.set()
        with suppress(OSError):  # wakes the thread
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        while self._evict():
            pass
        self._thread.join(1.0)  # where a shutdown wakes nobody it ends with the process

    def _accept(self) -> None:
        knock = select.poll()  # a call to accept fails without a descriptor, though nobody is there
        knock.register(self._listener)
        while not self._closed.is_set():
            if not knock.poll(LOOK_SECONDS * 1000):
                continue
            try:
                caller, address = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                self._seldom.warn("%s cannot let anybody in: %s", self._name, error.strerror)
                time.sleep(REST_SECONDS)  # strangers are gone soon, and a task may leave
                continue
            self._begin(caller, str(address[0]) if address else "")

    def _begin(self, caller: socket.socket, address: str) -> None:
        while len(self._unknown) >= self._most and self._evict():
            self._seldom.warn("%s has too many callers: strangers are sent away", self._name)
        with self._guard:
            self._unknown[caller] = address
        thread = threading.Thread(
            target=self._greet, args=(caller, address), name="spartito-caller", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads
            self._seldom.warn("%s cannot let anybody in: %s", self._name, error)
            self._forget(caller)
            caller.close()
            time.sleep(REST_SECONDS)

    def _greet(self, caller: socket.socket, address: str) -> None:
        try:
            if caller.family != getattr(socket, "AF_UNIX", None):
                caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end = time.monotonic() + GREETING_SECONDS
            challenge(caller, self._key, self._purpose, end)
        except UnknownPeerError as error:
            self._told(shown(address), error)
        except OSError:
            pass  # it left, or said nothing: a port scan, a health check
        else:
            if self._forget(caller):
                self._enter(caller)
                return
        self._forget(caller)
        caller.close()

    def _warn(self, address: str, why: UnknownPeerError) -> None:
        self._seldom.warn("%s sent %s away: %s", self._name, address, why)

    def _forget(self, caller: socket.socket) -> bool:
        """The caller is unknown no more; False if it was sent away meanwhile."""
        with self._guard:
            return self._unknown.pop(caller, None) is not None

    def _evict(self) -> bool:
        """Send away who is unknown for the longest time; False if nobody is."""
        with self._guard:
            if not self._unknown:
                return False
            caller = next(iter(self._unknown))
            del self._unknown[caller]
        with suppress(OSError):
            caller.shutdown(socket.SHUT_RDWR)  # its thread closes it
        return True
