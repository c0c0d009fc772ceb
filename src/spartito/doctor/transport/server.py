"""Where a doctor listens: it responds to probes, and takes in those that join."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from spartito.doctor.facts.network import holder_of
from spartito.doctor.findings import Port
from spartito.doctor.parallel import at_once
from spartito.doctor.transport.connection import Connection, PeerError
from spartito.doctor.transport.messages import PURPOSE, Invite, Join, Pong, Request
from spartito.errors import UserError
from spartito.wire.acceptor import Acceptor
from spartito.wire.addresses import DRAWN, Endpoint
from spartito.wire.handshake import OtherSecretError, UnknownPeerError
from spartito.wire.listening import EVERYWHERE, Opened, TakenError, UnresolvedError, open_listener
from spartito.wire.secret import NO_SECRET, Key
from spartito.wire.streams import Connection as Secured
from spartito.wire.streams import Socket

IDLE_SECONDS = 5.0
"""How long a caller may be silent."""

MOST_UNKNOWN_PEERS = 100
"""So many calls of unknown peers are kept for the report."""

GRACE_SECONDS = 0.2
"""How long after its end a question to the name service may come back."""


class DoctorServer:
    """Listens for task ``name`` until it is closed; ``joins`` holds who came to stay.

    ``invitations`` holds where the coordinator asks this task to come in. ``unknown_peers`` are
    the addresses of callers that are no tasks of Spartito, ``other_secrets`` of those that do not
    know ``key``, each with the times of its first and its newest call.
    """

    def __init__(self, name: str, listener: Socket, key: Key = NO_SECRET) -> None:
        self.name, self.key = name, key
        self.port: int = listener.getsockname()[1]
        self.joins: queue.Queue[tuple[Join, Connection]] = queue.Queue()
        self.invitations: queue.Queue[Connection] = queue.Queue()
        self.unknown_peers: list[str] = []
        self.other_secrets: dict[str, tuple[float, float]] = {}
        self._acceptor = Acceptor(
            listener, self._respond, key=key, purpose=PURPOSE, name=name, refused=self._note
        )

    def close(self) -> None:
        """Listen no more; close the connections that were not taken in."""
        self._acceptor.close()
        with suppress(queue.Empty):
            while True:
                self.joins.get_nowait()[1].close()
        with suppress(queue.Empty):
            while True:
                self.invitations.get_nowait().close()

    def _note(self, address: str, why: UnknownPeerError) -> None:
        now = time.monotonic()
        if len(self.unknown_peers) + len(self.other_secrets) >= MOST_UNKNOWN_PEERS:
            return
        if isinstance(why, OtherSecretError):
            first, _ = self.other_secrets.get(address, (now, now))
            self.other_secrets[address] = first, now
        else:
            self.unknown_peers.append(address)

    def _respond(self, caller: Secured) -> None:
        try:
            connection = Connection(caller)
        except PeerError:
            caller.close()  # it is gone already
            return
        try:
            while True:
                end = time.monotonic() + IDLE_SECONDS
                request = connection.receive(Request, end)
                if isinstance(request, Join):
                    self.joins.put((request, connection))
                    return
                if isinstance(request, Invite):
                    self.invitations.put(connection)
                    return
                connection.send(Pong(self.name, time.time()), end)
        except PeerError:
            pass  # the caller is gone or silent: it knows, and reports it
        connection.close()


def open_server(
    endpoint: Endpoint,
    end: float,
    spare: Sequence[int] = (),
    *,
    agent: bool = False,
    key: Key = NO_SECRET,
) -> tuple[DoctorServer, Port]:
    """Listen at ``endpoint`` as training would, and say how that went.

    Where training could not, at the same address on the first free one of ``spare``, else on any
    free port; on all interfaces if the name service does not know the address until ``end``.
    """
    opened = _open(endpoint, end)
    free, foreign = isinstance(opened, Opened), False
    if isinstance(opened, UnresolvedError) or opened is None:
        endpoint, free, foreign = replace(endpoint, host=EVERYWHERE, others=False), True, True
        opened = _open(endpoint, end)
    if isinstance(opened, TakenError):
        free = False
        opened = _open(replace(endpoint, ports=(*spare, DRAWN)), end)
    if not isinstance(opened, Opened):
        raise opened or UserError(f"{endpoint.name} can listen on no port of {endpoint.host}")
    wanted, last = endpoint.ports[0], endpoint.ports[-1]
    lost = not free or opened.drawn
    port = Port(
        wanted if lost else opened.port,
        free,
        holder_of(wanted) if lost else "",
        agent and not free,
        foreign or opened.foreign,
        last=last if not free and len(endpoint.ports) > 1 else 0,
        drawn=opened.port if free and opened.drawn else 0,
    )
    return DoctorServer(endpoint.name, opened.listener, key), port


def _open(endpoint: Endpoint, end: float) -> Opened | UserError | None:
    """What `open_listener` returns or raises; None if the name service is silent until ``end``."""

    def work(endpoint: Endpoint) -> Opened | UserError:
        try:
            return open_listener(endpoint, end - time.monotonic())
        except UserError as error:
            return error

    return at_once(work, [endpoint], end + GRACE_SECONDS)[0]
