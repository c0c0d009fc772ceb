"""A connection between each two tasks of a group, who find each other by the job's store."""

from __future__ import annotations

import queue
import secrets
import socket
import struct
import time
from collections.abc import Sequence

import torch.distributed as dist

from spartito.collectives.door import Door
from spartito.collectives.handshake import GREETING_SECONDS, reach, read
from spartito.collectives.sockets import listen
from spartito.collectives.store import roll_call
from spartito.errors import TaskLostError

RANK = struct.Struct("<I")
"""What a caller says first: its rank."""


def connect_all(
    rank: int,
    names: Sequence[str],
    store: dist.Store,
    timeout: float,
    address: str,
    key: bytes = b"",
) -> dict[int, socket.socket]:
    """A non-blocking connection to every other rank; all call this together.

    Each listens at ``address``, its own, on a port that the system chooses, and tells that to
    all at ``store`` with a word of its own. Who calls without this word and the job's ``key`` is
    hung up on: reading the store is not enough. Raises `TaskLostError` with the names of those
    who do not come within ``timeout`` seconds.
    """
    connections: dict[int, socket.socket] = {}
    came: queue.Queue[tuple[int, socket.socket]] = queue.Queue()
    word = secrets.token_hex(16)
    listener = listen(address, 0, names[rank], anywhere=False)
    host, port = listener.getsockname()[:2]
    door = Door(
        listener,
        lambda caller: _enter(caller, came),
        key=key,
        purpose=_purpose(word),
        name=names[rank],
    )
    try:
        absent, cards = roll_call(store, rank, names, timeout, f"{host} {port} {word}")
        if absent:
            raise _late(absent, timeout)
        for other in range(rank):
            connections[other] = _call(cards[other], rank, names[other], timeout, key)
        _answer(came, connections, names, rank, timeout)
    except BaseException:
        close_all(connections)
        raise
    finally:
        door.close()
        while not came.empty():
            came.get()[1].close()
    for connection in connections.values():
        connection.setblocking(False)
    return connections


def close_all(connections: dict[int, socket.socket]) -> None:
    """Close the connections and forget them."""
    while connections:
        connections.popitem()[1].close()


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
    connections: dict[int, socket.socket],
    names: Sequence[str],
    rank: int,
    timeout: float,
) -> None:
    """Put into ``connections`` those of all ranks after ours, who call us."""
    missing = set(range(rank + 1, len(names)))
    end = time.monotonic() + timeout
    while missing:
        try:
            other, caller = came.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise _late([names[other] for other in sorted(missing)], timeout) from None
        if other in missing:
            missing.discard(other)
            connections[other] = caller
        else:
            caller.close()


def _late(names: Sequence[str], timeout: float) -> TaskLostError:
    return TaskLostError(
        f"{' and '.join(names)} did not come within {timeout:g} s",
        "Look at the last lines of that task; SPARTITO_TIMEOUT sets the limit in seconds.",
    )
