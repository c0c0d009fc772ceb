"""A connection between each two tasks of a group, who find each other by the job's store."""

from __future__ import annotations

import queue
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial

import torch.distributed as dist

from spartito.cluster.endpoints import Endpoint
from spartito.cluster.listed import address
from spartito.collectives.acceptor import Acceptor
from spartito.collectives.forks import keep_from_forks
from spartito.collectives.handshake import GREETING_SECONDS, reach, read
from spartito.collectives.sockets import listen
from spartito.collectives.store import sign_in
from spartito.errors import TaskLostError

RANK = struct.Struct("<I")
"""What a caller says first: its rank."""


def connect_all(
    rank: int,
    names: Sequence[str],
    store: dist.Store,
    timeout: float,
    endpoint: Endpoint,
    key: bytes = b"",
) -> dict[int, socket.socket]:
    """A non-blocking connection to every other rank; all call this together.

    Each calls those after it, so all but the first listen, at their ``endpoint``, and tell at
    ``store`` where that is, with a word of its own. Who calls without this word and the job's
    ``key`` is hung up on: reading the store is not enough. Raises `TaskLostError` that names
    those who do not come within ``timeout`` seconds, and where they were called.
    """
    connections: dict[int, socket.socket] = {}
    came: queue.Queue[tuple[int, socket.socket]] = queue.Queue()
    word, where, card = secrets.token_hex(16), "", "nowhere"
    with ExitStack() as stack:
        if rank:
            listener = listen(endpoint, timeout)
            port = listener.getsockname()[1]
            where, card = address(endpoint.host, port), f"{endpoint.host} {port} {word}"
            enter, purpose = partial(_enter, came=came), _purpose(word)
            door = Acceptor(listener, enter, key=key, purpose=purpose, name=names[rank])
            stack.callback(_drain, came)
            stack.enter_context(closing(door))
        absent, cards = sign_in(store, rank, names, timeout, card)
        if absent:
            raise _late(f"{' and '.join(absent)} did not come within {timeout:g} s")
        try:
            for other in range(rank + 1, len(names)):
                connections[other] = _call(cards[other], rank, names[other], timeout, key)
            _answer(came, where, connections, names, rank, timeout)
        except BaseException:
            close_all(connections)
            raise
    for connection in connections.values():
        keep_from_forks(connection.fileno())
        connection.setblocking(False)
    return connections


def check_connections(
    rank: int,
    names: Sequence[str],
    store: dist.Store,
    timeout: float,
    endpoint: Endpoint,
    key: bytes = b"",
) -> None:
    """Connect every rank to every other one at an `Endpoint` like ``endpoint``, and hang up.

    For who leaves the connections to a library that names neither the task nor the address that
    it called in vain. Raises as `connect_all`.
    """
    close_all(connect_all(rank, names, dist.PrefixStore("up", store), timeout, endpoint, key))
    last = len(names) - 1
    back = dist.PrefixStore("down", store)
    close_all(connect_all(last - rank, names[::-1], back, timeout, endpoint, key))


def close_all(connections: dict[int, socket.socket]) -> None:
    """Close the connections and forget them."""
    while connections:
        connections.popitem()[1].close()


def _drain(came: queue.Queue[tuple[int, socket.socket]]) -> None:
    while not came.empty():
        came.get()[1].close()


def _purpose(word: str) -> str:
    return f"sockets {word}"


def _call(card: str, rank: int, name: str, timeout: float, key: bytes) -> socket.socket:
    """A connection to the task ``name``, which knows us from then on."""
    host, port, word = card.split()
    connection = reach(host, int(port), name, timeout, key=key, purpose=_purpose(word))
    try:
        connection.sendall(RANK.pack(rank))
    except OSError as error:
        connection.close()
        raise TaskLostError(f"{name} is gone: {error.strerror}") from error
    return connection


def _enter(caller: socket.socket, came: queue.Queue[tuple[int, socket.socket]]) -> None:
    """Hear which rank a caller has that knows the job's key."""
    try:
        said = read(caller, RANK.size, time.monotonic() + GREETING_SECONDS)
    except OSError:
        caller.close()
    else:
        came.put((RANK.unpack(said)[0], caller))


def _answer(
    came: queue.Queue[tuple[int, socket.socket]],
    where: str,
    connections: dict[int, socket.socket],
    names: Sequence[str],
    rank: int,
    timeout: float,
) -> None:
    """Put into ``connections`` those of all ranks before ours, who call us at ``where``."""
    missing = set(range(rank))
    end = time.monotonic() + timeout
    while missing:
        try:
            other, caller = came.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            late = " and ".join(names[other] for other in sorted(missing))
            raise _late(f"{late} did not reach {where} within {timeout:g} s") from None
        if other in missing:
            missing.discard(other)
            connections[other] = caller
        else:
            caller.close()


def _late(what: str) -> TaskLostError:
    return TaskLostError(
        what,
        "Look at the last lines of that task, and whether a firewall lets it through; "
        "SPARTITO_TIMEOUT sets the limit in seconds.",
    )
