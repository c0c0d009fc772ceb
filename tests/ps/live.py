"""A server that lives in this process, and what unknown peers send it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from spartito.collectives.membership.versions import Versions
from spartito.ps.client.vector import Vector
from spartito.ps.protocol.layout import cut
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.messages import (
    PURPOSE,
    Done,
    End,
    Hello,
    Load,
    Outcome,
    Pull,
    Push,
    Reply,
    Values,
    Welcome,
)
from spartito.ps.protocol.rules import Rules
from spartito.ps.server.server import Server
from spartito.ps.server.shard import Shard
from spartito.ps.server.snapshot import Snapshot
from spartito.ps.server.store import Store
from spartito.wire.addresses import DRAWN, Endpoint
from spartito.wire.frames import PREFIX, START, Gone, Wire
from spartito.wire.handshake import VERSION, prove
from spartito.wire.listening import listen
from spartito.wire.secret import NO_SECRET, Key
from tests.callers import call

HOST, LIMIT, JOB = "127.0.0.1", 30.0, "a job"


class Live:
    """A server in a thread, with values of a small model."""

    def __init__(
        self,
        folder: Path,
        rules: Rules,
        size: tuple[int, int] = (3, 2),
        timeout: float = 60,
        key: Key = NO_SECRET,
    ) -> None:
        self.key = key
        net = nn.Linear(*size)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        vector = Vector(net, optimizer)
        (self.span,) = cut(vector.layout, 1, 16, False)
        shard = Shard(vector.layout, self.span, optimizer, vector.tensors)
        self.store = Store(shard, rules, gates=True, log=None)
        listener = listen(Endpoint("ps 0", HOST, (DRAWN,)), 30.0)
        self.port: int = listener.getsockname()[1]
        self.server = Server(
            self.store, listener, name="ps 0", chief="worker 0", wire_dtype=None, timeout=timeout,
            snapshot=Snapshot(folder / "ps-0.safetensors", "ps 0"), seconds=1000,
            key=key,
        )  # fmt: skip
        self.hello = Hello(
            "worker 1", 1, False, JOB, vector.layout.digest, Versions.own(), str(rules), ""
        )
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()
        self.chief = self.wire(replace(self.hello, task="worker 0", worker=0, chief=True))
        self.chief.send(Load(JOB, [{}], 0), allocate(self.span).numpy().data)
        assert isinstance(self.chief.receive(), Done)

    def wire(self, hello: Hello) -> Wire:
        """A connection that was let in."""
        wire = self.unknown_peer()
        wire.send(hello)
        assert isinstance(wire.receive(), Welcome)
        return wire

    def unknown_peer(self) -> Wire:
        return Wire(call(self.port, PURPOSE, self.key), Reply, limit=1 << 24, timeout=LIMIT)

    def serves(self, step: int) -> None:
        """A proper client's push is applied, and it hears the new values."""
        wire, before = self.wire(self.hello), self.store.version
        wire.send(Pull(admit=True))
        found = wire.receive()
        assert isinstance(found, Values)
        gradient = torch.full((self.span.size // 4,), 0.5)
        push = push_of(keys=[(1, 0, step, 1)], pulled=found.version, norm=float(gradient.norm()))
        wire.send(push, gradient.numpy().data)
        reply = wire.receive()
        assert isinstance(reply, Values)
        assert (reply.outcome, reply.version) == (Outcome.APPLIED, before + 1)
        assert len(wire.payload) == self.span.size
        wire.close()

    def deaf(self, hello: Hello, message: msgspec.Struct) -> socket.socket:
        """A task of the job that asks and reads no reply; its system takes a few KB of it."""
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        raw.connect((HOST, self.port))
        known = prove(raw, "ps 0", NO_SECRET, PURPOSE, time.monotonic() + LIMIT)
        wire = Wire(known, Reply, timeout=LIMIT)
        wire.send(hello)
        assert isinstance(wire.receive(), Welcome)
        wire.send(message)
        return raw

    def close(self) -> None:
        self.chief.send(End())
        self.chief.receive()
        self.chief.close()
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()


def push_of(**facts: Any) -> Push:
    plain: dict[str, Any] = {
        "keys": [(1, 0, 0, 1)], "pulled": 0, "weight": 1.0, "examples": 4, "absent": [],
    }  # fmt: skip
    return Push(**(plain | facts))


def reply_or_close(wire: Wire) -> Any:
    """What a connection hears next; None if it is closed. Silence until the limit fails."""
    try:
        return wire.receive()
    except Gone:
        return None
    finally:
        wire.close()


def frame(message: msgspec.Struct, **facts: int) -> bytes:
    """A frame whose CRC is right, whatever else is not."""
    header = msgspec.msgpack.encode(message)
    told = {"version": VERSION, "flags": 0, "header": len(header), "size": 0, "sum": 0} | facts
    fields = (b"SPTO", told["version"], told["flags"], 0, told["header"], told["size"])
    bare = PREFIX.pack(*fields, 0, told["sum"])
    header += bytes(max(0, START - PREFIX.size - len(header)))
    return PREFIX.pack(*fields, zlib.crc32(bare + header), told["sum"]) + header


def hear(live: Live, data: bytes) -> None:
    """Send raw bytes and our end; what comes is a refusal or the end."""
    with call(live.port, PURPOSE) as raw:
        with contextlib.suppress(OSError):  # it may close before it has heard all
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
        heard = True
        while heard:
            with contextlib.suppress(ConnectionError):
                heard = bool(raw.recv(4096))
                continue
            heard = False
