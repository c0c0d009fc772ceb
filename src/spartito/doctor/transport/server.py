"""Where a doctor listens: it answers whoever knocks, and takes in those that join."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from spartito.cluster.endpoints import DRAWN, Endpoint
from spartito.cluster.secret import NO_SECRET
from spartito.collectives.acceptor import Acceptor
from spartito.collectives.sockets import Opened, TakenError, UnresolvedError, open_listener
from spartito.doctor.facts.network import holder_of
from spartito.doctor.probe.probes import PUSHES, at_once
from spartito.doctor.transport.connection import PURPOSE, GarbageError, Talk
from spartito.doctor.transport.messages import Invite, Join, Pong, Port, Push, Question
from spartito.errors import UserError

IDLE_SECONDS = 5.0
"""How long a caller may be silent."""

MOST_STRANGERS = 100
"""So many calls of strangers are kept for the report."""

GRACE_SECONDS = 0.2
"""How long after its end a question to the name service may come back."""

ANYWHERE = "0.0.0.0"
"""All interfaces: where a doctor listens that does not know its own name."""


class Station:
    """Listens for task ``name`` until it is closed; ``joins`` holds who came to stay.

    ``invites`` holds where the one that leads asks this task to come in.

    ``strangers`` are the addresses of callers that are no doctors, or do not know ``key``.
    """

    def __init__(self, name: str, listener: socket.socket, key: bytes = NO_SECRET) -> None:
        self.name, self.key = name, key
        self.port: int = listener.getsockname()[1]
        self.joins: queue.Queue[tuple[Join, Talk]] = queue.Queue()
        self.invites: queue.Queue[Talk] = queue.Queue()
        self.strangers: list[str] = []
        self._door = Acceptor(
            listener, self._answer, key=key, purpose=PURPOSE, name=name, told=self._note
        )

    def close(self) -> None:
        """Listen no more; those that came to stay and were not taken in are hung up on."""
        self._door.close()
        with suppress(queue.Empty):
            while True:
                self.joins.get_nowait()[1].close()
        with suppress(queue.Empty):
            while True:
                self.invites.get_nowait().close()

    def _note(self, address: str, why: str) -> None:
        if len(self.strangers) < MOST_STRANGERS:
            self.strangers.append(address)

    def _answer(self, connection: socket.socket) -> None:
        talk = Talk(connection)
        try:
            while True:
                end = time.monotonic() + IDLE_SECONDS
                question = talk.hear(Question, end)
                if isinstance(question, Join):
                    self.joins.put((question, talk))
                    return
                if isinstance(question, Invite):
                    self.invites.put(talk)
                    return
                if isinstance(question, Push):
                    if not 0 <= question.size <= PUSHES[-1]:
                        raise GarbageError(f"{question.size} bytes are not what a doctor sends")
                    talk.skip(question.size, end)
                talk.say(Pong(self.name, time.time()), end)
        except (GarbageError, OSError):
            pass  # the caller has hung up, or went silent: it knows, and tells
        talk.close()


def open_station(
    endpoint: Endpoint,
    end: float,
    spare: Sequence[int] = (),
    *,
    agent: bool = False,
    key: bytes = NO_SECRET,
) -> tuple[Station, Port]:
    """Listen at ``endpoint`` as training would, and say how that went.

    Where training could not, at the same address on the first free one of ``spare``, else on any
    free port; on all interfaces if the name service does not know the address until ``end``.
    """
    opened = _enter(endpoint, end)
    free, foreign = isinstance(opened, Opened), False
    if isinstance(opened, UnresolvedError) or opened is None:
        endpoint, free, foreign = replace(endpoint, host=ANYWHERE, others=False), True, True
        opened = _enter(endpoint, end)
    if isinstance(opened, TakenError):
        free = False
        opened = _enter(replace(endpoint, ports=(*spare, DRAWN)), end)
    if not isinstance(opened, Opened):
        raise opened or UserError(f"{endpoint.name} can listen on no port of {endpoint.host}")
    wanted, last = endpoint.ports[0], endpoint.ports[-1]
    lost = not free or opened.drawn
    told = Port(
        wanted if lost else opened.port,
        free,
        holder_of(wanted) if lost else "",
        agent and not free,
        foreign or opened.foreign,
        last=last if not free and len(endpoint.ports) > 1 else 0,
        drawn=opened.port if free and opened.drawn else 0,
    )
    return Station(endpoint.name, opened.listener, key), told


def _enter(endpoint: Endpoint, end: float) -> Opened | UserError | None:
    """What `open_listener` returns or raises; None if the name service is silent until ``end``."""

    def work(endpoint: Endpoint) -> Opened | UserError:
        try:
            return open_listener(endpoint, end - time.monotonic())
        except UserError as error:
            return error

    return at_once(work, [endpoint], end + GRACE_SECONDS)[0]
