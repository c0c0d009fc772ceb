"""Where a doctor listens: it answers whoever knocks, and takes in those that join."""

from __future__ import annotations

import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from spartito.cluster.spec import is_loopback
from spartito.launch.doctor.messages import Join, Pong, Port, Push, Question
from spartito.launch.doctor.network import holder_of, resolve_names
from spartito.launch.doctor.probe import PUSHES
from spartito.launch.doctor.talk import GarbageError, Talk

IDLE_SECONDS = 5.0
"""How long a caller may be silent."""

BACKLOG = 256


class Station:
    """Listens for task ``name`` until it is closed; ``joins`` holds who came to stay.

    ``strangers`` are the addresses of callers that are no doctors.
    """

    def __init__(self, name: str, listener: socket.socket) -> None:
        self.name = name
        self.port: int = listener.getsockname()[1]
        self.joins: queue.Queue[tuple[Join, Talk]] = queue.Queue()
        self.strangers: list[str] = []
        self._listener = listener
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Listen no more; those that joined and were not taken in are hung up on."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        while True:
            try:
                self.joins.get_nowait()[1].close()
            except queue.Empty:
                return

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return  # closed
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = Talk(connection), str(address[0])
            threading.Thread(target=self._answer, args=caller, daemon=True).start()

    def _answer(self, talk: Talk, address: str) -> None:
        try:
            while True:
                end = time.monotonic() + IDLE_SECONDS
                question = talk.hear(Question, end)
                if isinstance(question, Join):
                    self.joins.put((question, talk))
                    return
                if isinstance(question, Push):
                    if not 0 <= question.size <= PUSHES[-1]:
                        raise GarbageError(f"{question.size} bytes are not what a doctor sends")
                    talk.skip(question.size, end)
                talk.say(Pong(self.name, time.time()), end)
        except GarbageError:
            self.strangers.append(address)
        except OSError:
            pass  # the caller has hung up, or went silent: it knows, and tells
        talk.close()


def open_station(
    name: str, host: str, ports: Sequence[int], end: float, agent: bool = False
) -> tuple[Station, Port]:
    """Listen at ``host`` on the first free one of ``ports``, else on any free port.

    The second answer is about the first of ``ports``. On all interfaces where ``host`` is no
    address of this machine, or a name for its loopback, as training would; or where the name
    service does not answer until ``end``.
    """
    family, address, foreign = _own_address(host, end)
    for port in ports:
        listener = _bound(family, address, port)
        if listener is not None:
            break
    else:
        listener = _bound(family, address, 0)
    if listener is None:
        raise OSError(errno.EADDRNOTAVAIL, f"{name} can listen on no port of {address}")
    station = Station(name, listener)
    first = ports[0] if ports else station.port
    free = station.port == first
    holder = "" if free else holder_of(first)
    return station, Port(first, free, holder, agent and not free, foreign)


def _own_address(host: str, end: float) -> tuple[int, str, bool]:
    """The family and address to listen at for ``host``, and whether that is not ``host``."""
    (name,) = resolve_names([host], end)
    if name.error:
        return socket.AF_INET, "0.0.0.0", True
    own = name.addresses[0]
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    wildcard = "::" if family == socket.AF_INET6 else "0.0.0.0"
    if is_loopback(own) and not is_loopback(host):
        return family, wildcard, False
    probe = _bound(family, own, 0)
    if probe is None:
        return family, wildcard, True
    probe.close()
    return family, own, False


def _bound(family: int, address: str, port: int) -> socket.socket | None:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener
