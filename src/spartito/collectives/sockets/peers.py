"""A connection between each two tasks of a group, who find each other by the job's store."""

from __future__ import annotations

import queue
import secrets
import struct
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from spartito.collectives.membership.store import Membership
from spartito.errors import TaskLostError
from spartito.forks import keep_from_forks
from spartito.wire.acceptor import Acceptor
from spartito.wire.addresses import Endpoint, address
from spartito.wire.dialing import reach
from spartito.wire.handshake import read
from spartito.wire.limits import GREETING_SECONDS
from spartito.wire.listening import listen
from spartito.wire.secret import NO_SECRET, Key
from spartito.wire.streams import Connection

LOOK = 0.5  # seconds between two looks who lives
SOON = 10.0
RANK = struct.Struct("<I")
"""What a caller says first: its rank."""


def connect_all(
    group: Membership, endpoint: Endpoint, key: Key = NO_SECRET
) -> dict[int, Connection]:
    """A non-blocking connection to every other rank; all call this together.

    Each calls those after it, so all but the first listen, at their ``endpoint``, and say at the
    store where that is, with a random token. A caller without this token and the job's ``key``
    is refused: reading the store is not enough.

    Raises:
        TaskLostError: Names those who do not come within the time limit, and where they were
            called.
    """
    connections: dict[int, Connection] = {}
    came: queue.Queue[tuple[int, Connection]] = queue.Queue()
    token, where, card = secrets.token_hex(16), "", "nowhere"
    with ExitStack() as stack:
        if group.rank:
            listener = listen(endpoint, group.timeout)
            port = listener.getsockname()[1]
            where, card = address(endpoint.host, port), f"{endpoint.host} {port} {token}"
            acceptor = Acceptor(
                listener,
                partial(_read_rank, came=came, before=group.rank),
                key=key,
                purpose=_purpose(group, token),
                name=group.names[group.rank],
            )
            stack.callback(_drain, came)
            stack.enter_context(closing(acceptor))
        missing, cards = group.sign_in(group.timeout, card)
        if missing:
            raise _late(f"{' and '.join(missing)} did not come within {group.timeout:g} s")
        try:
            for other in range(group.rank + 1, group.size):
                connections[other] = _call(cards[other], group, other, key)
            _accept_earlier(came, where, connections, group)
        except BaseException:
            close_all(connections)
            raise
    for connection in connections.values():
        keep_from_forks(connection.fileno())
        connection.setblocking(False)
    return connections


def check_connections(group: Membership, endpoint: Endpoint, key: Key = NO_SECRET) -> None:
    """Connect every rank to every other one at an `Endpoint` like ``endpoint``, and close.

    For who leaves the connections to a library that names neither the task nor the address that
    it called in vain. Raises as `connect_all`.
    """
    close_all(connect_all(group.under("up"), endpoint, key))
    back = replace(group, rank=group.size - 1 - group.rank, names=group.names[::-1])
    close_all(connect_all(back.under("down"), endpoint, key))


def close_all(connections: dict[int, Connection]) -> None:
    """Close the connections and forget them."""
    while connections:
        connections.popitem()[1].close()


def _drain(came: queue.Queue[tuple[int, Connection]]) -> None:
    while not came.empty():
        came.get()[1].close()


def _purpose(group: Membership, token: str) -> str:
    """Who calls by the card of another generation is refused."""
    return f"sockets {group.generation} {token}"


def _call(card: str, group: Membership, other: int, key: Key) -> Connection:
    """A connection to the rank ``other``, which knows our rank from then on."""
    host, port, token = card.split()
    name, purpose = group.names[other], _purpose(group, token)
    connection = reach(host, int(port), name, _limit(group), key=key, purpose=purpose)
    try:
        connection.sendall(RANK.pack(group.rank))
    except OSError as error:
        connection.close()
        raise TaskLostError(f"{name} is gone: {error.strerror}") from error
    return connection


def _read_rank(caller: Connection, came: queue.Queue[tuple[int, Connection]], before: int) -> None:
    """Read which rank ``before`` ours a caller has that knows the job's key."""
    try:
        (rank,) = RANK.unpack(read(caller, RANK.size, time.monotonic() + GREETING_SECONDS))
    except OSError:
        rank = before
    if rank < before:
        came.put((rank, caller))
    else:
        caller.close()


def _accept_earlier(
    came: queue.Queue[tuple[int, Connection]],
    where: str,
    connections: dict[int, Connection],
    group: Membership,
) -> None:
    """Put into ``connections`` those of all ranks before ours, who call us at ``where``."""
    missing = set(range(group.rank))
    limit = _limit(group)
    end = time.monotonic() + limit
    while missing:
        try:
            left = max(0.0, end - time.monotonic())
            other, caller = came.get(timeout=min(left, LOOK) if group.recovers else left)
        except queue.Empty:
            late = [group.names[other] for other in sorted(missing)]
            if time.monotonic() < end and not group.lost(late):
                continue
            late_ones = " and ".join(late)
            raise _late(f"{late_ones} did not reach {where} within {limit:g} s") from None
        if other in missing:
            missing.discard(other)
            connections[other] = caller
        else:
            caller.close()


def _limit(group: Membership) -> float:
    """Seconds for connections: who recovers has just heard of all, and may try again."""
    return min(group.timeout, SOON) if group.recovers else group.timeout


def _late(what: str) -> TaskLostError:
    return TaskLostError(
        what,
        "Look at the last lines of that task, and whether a firewall lets it through; "
        "SPARTITO_TIMEOUT sets the limit in seconds.",
    )
