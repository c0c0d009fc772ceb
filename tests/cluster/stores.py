"""A store of this process, and who comes to it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from spartito.cluster.store.client import Store
from spartito.cluster.store.server import Server
from spartito.wire.secret import Key

SECRET = b"a secret of this test"
KEY, TLS = Key(SECRET), Key(SECRET, encrypts=True)
LIMIT = 20.0  # seconds that no passing test comes near
_clients: list[Store] = []


@contextmanager
def served(key: Key = KEY) -> Iterator[Server]:
    """A store of this process."""
    server = Server(socket.create_server(("127.0.0.1", 0)), key)
    try:
        yield server
    finally:
        while _clients:
            _clients.pop().close()
        server.close()


def client(server: Server | tuple[str, int], key: Key = KEY, limit: float = LIMIT) -> Store:
    """Somebody who comes to it."""
    address = server.address if isinstance(server, Server) else server
    made = Store(*address, key, limit)
    _clients.append(made)
    return made


def is_closed(caller: socket.socket) -> bool:
    """Whether the other end closes the connection, whatever it says before."""
    try:
        while caller.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True
