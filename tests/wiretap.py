"""What somebody hears who sits between a caller and a port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HOST, LIMIT = "127.0.0.1", 30.0


@contextmanager
def between(port: int) -> Iterator[tuple[int, bytearray]]:
    """A port that passes one connection on to ``port``, and what passed, both ways."""
    heard = bytearray()

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                heard.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve(server: socket.socket) -> None:
        with suppress(OSError):
            caller, _ = server.accept()
            with caller, socket.create_connection((HOST, port), LIMIT) as called:
                other = threading.Thread(target=pass_on, args=(caller, called))
                other.start()
                pass_on(called, caller)
                other.join()

    with socket.create_server((HOST, 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        yield server.getsockname()[1], heard
        thread.join()
