"""A connection between each two tasks of a group, who find each other by the job's store."""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from spartito.collectives.sockets import dial, listen
from spartito.collectives.store import roll_call
from spartito.errors import TaskLostError

HELLO = struct.Struct("<16sI")
"""The secret of the task that is called, and the rank of the one that calls."""


def connect_all(
    rank: int, names: Sequence[str], store: dist.Store, timeout: float, address: str
) -> dict[int, socket.socket]:
    """A non-blocking connection to every other rank; all call this together.

    Each listens at ``address``, its own, on a port that the system chooses, and tells that to
    all at ``store`` with a secret. Who calls without the secret is hung up on. Raises
    `TaskLostError` with the names of those who do not come within ``timeout`` seconds.
    """
    connections: dict[int, socket.socket] = {}
    secret = secrets.token_bytes(16)
    with listen(address, 0, names[rank], anywhere=False) as listener:
        host, port = listener.getsockname()[:2]
        card = f"{host} {port} {secret.hex()}"
        absent, cards = roll_call(store, rank, names, timeout, card)
        if absent:
            raise _late(absent, timeout)
        try:
            for other in range(rank):
                connections[other] = _call(cards[other], rank, names[other], timeout)
            _answer(listener, secret, connections, names, rank, timeout)
        except BaseException:
            close_all(connections)
            raise
    for connection in connections.values():
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connections


def close_all(connections: dict[int, socket.socket]) -> None:
    """Close the connections and forget them."""
    while connections:
        connections.popitem()[1].close()


def _call(card: str, rank: int, name: str, timeout: float) -> socket.socket:
    """A connection to the task ``name``, which knows us from then on."""
    host, port, secret = card.split()
    connection = dial(host, int(port), name, timeout)
    try:
        connection.sendall(HELLO.pack(bytes.fromhex(secret), rank))
    except OSError as error:
        connection.close()
        raise TaskLostError(f"{name} is gone: {error.strerror}") from error
    return connection


def _answer(
    listener: socket.socket,
    secret: bytes,
    connections: dict[int, socket.socket],
    names: Sequence[str],
    rank: int,
    timeout: float,
) -> None:
    """Put into ``connections`` those of all ranks after ours, who call at ``listener``."""
    missing = set(range(rank + 1, len(names)))
    end = time.monotonic() + timeout
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        callers: dict[int, socket.socket] = {}
        try:
            while missing:
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready or time.monotonic() > end:
                    raise _late([names[other] for other in sorted(missing)], timeout)
                for key, _ in ready:
                    if key.fd == listener.fileno():
                        with suppress(OSError):  # the caller hung up meanwhile
                            caller = listener.accept()[0]
                            caller.setblocking(False)
                            callers[caller.fileno()] = caller
                            selector.register(caller, selectors.EVENT_READ, bytearray())
                        continue
                    heard = _heard(callers[key.fd], key.data)
                    if heard is None:
                        continue
                    selector.unregister(key.fd)
                    caller = callers.pop(key.fd)
                    word, other = heard
                    if secrets.compare_digest(word, secret) and other in missing:
                        missing.discard(other)
                        connections[other] = caller
                    else:
                        caller.close()
        finally:
            close_all(callers)


def _heard(caller: socket.socket, said: bytearray) -> tuple[bytes, int] | None:
    """The secret and the rank that ``caller`` has ``said``, None: not yet; no secret: it left."""
    try:
        more = caller.recv(HELLO.size - len(said))
    except BlockingIOError:
        return None
    except OSError:
        more = b""
    said += more
    if len(said) < HELLO.size:
        return None if more else (b"", 0)
    word, rank = HELLO.unpack(said)
    return word, rank


def _late(names: Sequence[str], timeout: float) -> TaskLostError:
    return TaskLostError(
        f"{' and '.join(names)} did not come within {timeout:g} s",
        "Look at the last lines of that task; SPARTITO_TIMEOUT sets the limit in seconds.",
    )
