"""Parameter servers with nothing but the transport: a thread per connection, one fused Adam.

What they receive is a gradient of ``(floats,)``, and what they send back are the new values; both
lie ready in flat memory. No framing, no checks, no keys, no versions, nobody may die.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

LIMIT = 60.0  # seconds of silence
ITEM = 4  # bytes of a float32


class Client(Protocol):
    """A worker's side: memory of its own for the gradient and for the values."""

    gradient: Tensor
    values: Tensor

    def exchange(self) -> None:
        """Push the gradient, and have the new values."""
        ...


class BareServer(Protocol):
    """The other side, which serves from threads of its own."""

    address: str


class Values:
    """The parameters as one tensor, and Adam on them."""

    def __init__(self, floats: int) -> None:
        self._parameter = nn.Parameter(torch.zeros(floats))
        self._adam = torch.optim.Adam([self._parameter], lr=1e-3, fused=True)
        self._turn = threading.Lock()

    @torch.no_grad()
    def update(self, gradient: Tensor, values: Tensor) -> None:
        """One step with ``gradient``; ``values`` gets what came out, consistent."""
        with self._turn:
            self._parameter.grad = gradient
            self._adam.step()
            values.copy_(self._parameter)


class SocketServer:
    """Gradients and values go through blocking TCP sockets."""

    def __init__(self, floats: int, clients: int) -> None:
        self._values, self._floats = Values(floats), floats
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = str(listener.getsockname()[1])
        _start(lambda: _accept(listener, clients, self._serve))

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        gradient, values = torch.zeros(self._floats), torch.zeros(self._floats)
        target, reply = memory_of(gradient), memory_of(values)
        while receive(sock, target):
            self._values.update(gradient, values)
            send(sock, reply)


class SocketClient:
    """The worker's side of a `SocketServer`."""

    def __init__(self, address: str, floats: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", int(address)), LIMIT)
        self._sock.settimeout(None)  # blocking, as the server's
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.gradient, self.values = torch.zeros(floats), torch.zeros(floats)
        self._out, self._target = memory_of(self.gradient), memory_of(self.values)

    def exchange(self) -> None:
        """As `Client.exchange`."""
        send(self._sock, self._out)
        receive(self._sock, self._target)


class SharedServer:
    """Gradients and values lie in a mapped file; a byte on a UNIX socket says that they do."""

    def __init__(self, floats: int, clients: int) -> None:
        self._values, self._floats = Values(floats), floats
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.address = self._folder.name
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{self.address}/socket")
        listener.listen(clients)
        _start(lambda: _accept(listener, clients, self._serve))

    def _serve(self, sock: socket.socket) -> None:
        number = sock.recv(1)[0]
        path = Path(self.address, str(number))
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 2 * ITEM * self._floats)
        gradient, values = map_pair(path, self._floats)
        sock.sendall(b"!")
        while sock.recv(1):
            self._values.update(gradient, values)
            sock.sendall(b"!")


class SharedClient:
    """Worker ``number``'s side of a `SharedServer`."""

    def __init__(self, address: str, floats: int, number: int) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(f"{address}/socket")
        self._sock.sendall(bytes([number]))
        self._sock.recv(1)
        path = Path(address, str(number))
        self.gradient, self.values = map_pair(path, floats)
        path.unlink()  # both have it; now it goes with them, however they end

    def exchange(self) -> None:
        """As `Client.exchange`."""
        self._sock.sendall(b"?")
        self._sock.recv(1)


def map_pair(path: Path, floats: int) -> tuple[Tensor, Tensor]:
    """A file of two tensors of ``(floats,)``."""
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 2 * ITEM * floats)
    both = torch.frombuffer(mapped, dtype=torch.float32)
    return both[:floats], both[floats:]


def memory_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, in place."""
    return tensor.view(torch.uint8).numpy().data


def send(sock: socket.socket, data: memoryview) -> None:
    """All of ``data``."""
    sent = 0
    while sent < len(data):
        sent += sock.sendmsg([data[sent:]])


def receive(sock: socket.socket, target: memoryview) -> bool:
    """Fill ``target``; False when the other end has left."""
    got = 0
    while got < len(target):
        count = sock.recv_into(target[got:])
        if not count:
            return False
        got += count
    return True


def _accept(listener: socket.socket, clients: int, serve: Callable[[socket.socket], None]) -> None:
    for _ in range(clients):
        sock, _ = listener.accept()
        _start(lambda sock=sock: serve(sock))  # type: ignore[misc]


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()
