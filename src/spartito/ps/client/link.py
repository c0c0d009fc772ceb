"""A task's link to one parameter server, which reconnects when the connection breaks."""

from __future__ import annotations

import mmap
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from spartito.cluster.handshake import prove
from spartito.cluster.secret import NO_SECRET, Key
from spartito.cluster.spec import split_address
from spartito.collectives.sockets import RETRY_SECONDS, dial
from spartito.errors import TaskLostError, UserError
from spartito.ps.client.vector import Copies, Vector
from spartito.ps.protocol.codec import PlainCodec, make_codec
from spartito.ps.protocol.keys import Keys
from spartito.ps.protocol.layout import Span, runs, unused
from spartito.ps.protocol.memory import LOCAL, allocate, areas, dtype_of
from spartito.ps.protocol.messages import (
    PURPOSE,
    GetApplied,
    GetState,
    Hello,
    Load,
    LoadState,
    Message,
    Push,
    Refused,
    Reply,
    Schedule,
    State,
    Values,
    Welcome,
)
from spartito.ps.protocol.runtime import SYSTEM, Channel, Runtime
from spartito.ps.protocol.slots import State as OptimizerState
from spartito.ps.protocol.transfer import state_limit, state_message
from spartito.ps.protocol.wire import LONG_HEADER, Gone, ProtocolError, Wire

BREAKS = 5
"""How often in a row a server may break the connection without a reply."""


MOST_KEYS = 64 << 20
"""Bytes of a server's applied work items."""


class Restarted(Exception):
    """A server was restarted: what it received since its snapshot is forgotten."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and what it is called in messages."""

    name: str
    host: str
    port: int

    @classmethod
    def of(cls, index: int, address: str) -> Address:
        """Server number ``index`` at ``host:port``."""
        return cls(f"ps {index} ({address})", *split_address(address))


class Link:
    """The connection to one server, made again when it breaks.

    ``push`` and ``pull`` are memory of the server's span, uint8 ``(bytes,)``: what is sent with
    `Push`, and where values arrive. No call takes longer than ``timeout`` seconds.
    Both ends must know ``key``, the job's secret.
    """

    def __init__(
        self, address: Address, hello: Hello, span: Span, vector: Vector, wire_dtype: str | None,
        timeout: float, key: Key = NO_SECRET, runtime: Runtime = SYSTEM,
    ) -> None:  # fmt: skip
        self.address, self.span, self._key = address, span, key
        self._hello, self._timeout, self._runtime = hello, timeout, runtime
        self._vector = vector
        self._codec = make_codec(vector.layout, span, wire_dtype)
        self._plain = PlainCodec(vector.layout, span)  # how much goes by shared memory
        self.runs = runs(vector.layout, span)
        self._all_runs = frozenset(range(len(self.runs)))
        self._changed: frozenset[int] = frozenset()  # runs whose values came since `fill_model`
        self._sent = self._received = 0
        self._wire: Channel | None = None
        self._breaks = 0
        self._shared = False
        self.push, self.pull = torch.empty(0), torch.empty(0)
        self.incarnation = ""
        self.ready = False
        self._connect()

    @property
    def sent(self) -> int:
        """Bytes that went to the server, by the wire or by shared memory."""
        return self._sent + (self._wire.sent if self._wire else 0)

    @property
    def received(self) -> int:
        """Bytes that came from it."""
        return self._received + (self._wire.received if self._wire else 0)

    @property
    def shared(self) -> bool:
        """Whether values and gradients lie in memory that the server shares."""
        return self._shared

    def send(self, message: Message) -> None:
        """Send a request; a `Push` takes what lies in ``push`` along."""
        while True:
            try:
                return self._send(message)
            except (Gone, TimeoutError, ProtocolError) as error:
                self._recover(error)

    def receive(self, asked: Message) -> Any:
        """The reply to ``asked``, with values in ``pull`` if there were any.

        If the connection breaks ``asked`` is sent again, which changes nothing if it was received.
        """
        while True:
            try:
                reply = self._receive()
            except (Gone, TimeoutError, ProtocolError) as error:
                self._recover(error)
                self.send(asked)
            else:
                self._breaks = 0
                return self._checked(reply)

    def ask(self, message: Message) -> Any:
        """Send, and receive."""
        self.send(message)
        return self.receive(message)

    def load(self, load: Load, values: Tensor, state: OptimizerState) -> None:
        """Give the server its values and the optimizer's tensors."""
        tensors = [state_message(slot, key, value) for (slot, key), value in state.items()]
        self._insist((load, values.numpy().data), *tensors)
        self._hello = replace(self._hello, loaded=True)

    def schedule(self, timetable: bytes) -> None:
        """Send the server the optimizer's options by global step."""
        self._insist((Schedule(), timetable))

    def state(self) -> tuple[Tensor, OptimizerState, list[dict[str, Any]]]:
        """The server's values, uint8 ``(bytes,)``, the optimizer's tensors and its options."""
        while True:
            head: State = self.ask(GetState())
            try:
                return *self._state(head), head.settings
            except (Gone, TimeoutError, ProtocolError) as error:
                self._recover(error)

    def applied(self, data_shards: int) -> Keys:
        """Which work items the server has applied."""
        self.ask(GetApplied())
        return Keys.load(data_shards, bytes(self._open.payload))

    def fill_model(self) -> None:
        """The values that came into the model."""
        self.incoming.load(self._changed)
        self._changed = frozenset()

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed: by us, or because the server is lost."""
        return self._wire is None

    def close(self) -> None:
        """Close the connection. Calling it again changes nothing."""
        if self._wire is not None:
            self._sent, self._received = self.sent, self.received
            self._wire.close()
            self._wire = None

    @property
    def _open(self) -> Channel:
        if self._wire is None:
            raise TaskLostError(f"{self.address.name} was closed already")
        return self._wire

    def _send(self, message: Message) -> None:
        if not isinstance(message, Push) or message.dropped:
            self._open.send(message)
            return
        left_out = unused(self.runs, message.absent)
        if self._shared:
            self._open.send(message)
            self._sent += self._plain.size_without(left_out)
        else:
            self._open.send(message, *self._codec.encode(self.push, left_out))

    def _insist(self, *messages: tuple[Message, Any]) -> None:
        """Send all messages, each with its payload, until the server has replied to them."""
        while True:
            try:
                for message in messages:
                    self._open.send(*message)
                self._checked(self._open.receive())
                return
            except (Gone, TimeoutError, ProtocolError) as error:
                self._recover(error)

    def _state(self, head: State) -> tuple[Tensor, OptimizerState]:
        values = allocate(self.span)
        values.copy_(torch.frombuffer(bytearray(self._open.payload), dtype=torch.uint8))
        found: OptimizerState = {}
        for _ in range(head.tensors):
            part: LoadState = self._checked(self._open.receive())
            data = torch.frombuffer(bytearray(self._open.payload), dtype=dtype_of(part.dtype))
            found[part.slot, part.key] = data.view(part.shape)
        return values, found

    def _receive(self) -> Any:
        buffer = None if self._shared else self._codec.buffer(self.pull)
        reply = self._open.receive(buffer)
        if isinstance(reply, Values) and reply.unchanged is not None:
            self._take(frozenset(reply.unchanged))
        return reply

    def _take(self, unchanged: frozenset[int]) -> None:
        """Values came, but for these runs."""
        codec, payload = self._codec, self._open.payload
        if self._shared:
            self._received += self._plain.size_without(unchanged)
        elif len(payload) != codec.size_without(unchanged):
            raise ProtocolError(f"{len(payload)} bytes of values came, and not those of the rest")
        else:
            codec.decode(self.pull, payload, unchanged)
        self._changed |= self._all_runs - unchanged

    def _checked(self, reply: Any) -> Any:
        if isinstance(reply, Refused):
            if reply.lost:
                raise TaskLostError(reply.why, reply.advice)
            raise UserError(reply.why, reply.advice)
        return reply

    def _connect(self) -> None:
        end = self._runtime.now() + self._timeout
        while True:
            try:
                return self._connect_once(end)
            except OSError as error:  # it died while we met: it may come again
                if self._runtime.now() + RETRY_SECONDS >= end:
                    raise self._silence() from error
                self._runtime.sleep(RETRY_SECONDS)

    def _connect_once(self, end: float) -> None:
        """Connect and say hello once; `Restarted` if it is another process than last time."""
        where, wire = self.address, self._dial(end)
        try:
            wire.send(self._hello)
            welcome: Welcome = self._checked(wire.receive())
            self._shared = bool(welcome.segment)
            if self._shared:
                push_at, pull_at, size = areas(self.span)
                memory = _map(Path(welcome.segment), size)
                local = socket.socket(socket.AF_UNIX)
                remote, wire = wire, Wire(local, Reply)
                local.connect(welcome.socket)
                prove(local, where.name, self._key, LOCAL, end)
                remote.close()
                push = torch.frombuffer(memory, dtype=torch.uint8)[push_at:][: self.span.size]
                pull = torch.frombuffer(memory, dtype=torch.uint8)[pull_at:][: self.span.size]
            else:
                push, pull = allocate(self.span), allocate(self.span)
        except BaseException:
            wire.close()
            raise
        wire.timeout = self._timeout
        wire.header_limit = LONG_HEADER
        wire.limit = state_limit(self.span) + MOST_KEYS
        if self.push.numel():
            push.copy_(self.push)
            pull.copy_(self.pull)
        self.push, self.pull, self._wire = push, pull, wire
        self.outgoing = Copies(self._vector, self.span, push)
        self.incoming = Copies(self._vector, self.span, pull)
        self.ready = welcome.ready
        before, self.incarnation = self.incarnation, welcome.incarnation
        if before and before != self.incarnation:
            self._breaks = 0
            raise Restarted(where.name)

    def _dial(self, end: float) -> Channel:
        """A connection to the server, both ends of which know the secret."""
        where, left = self.address, max(RETRY_SECONDS, end - self._runtime.now())
        sock = dial(where.host, where.port, where.name, self._timeout, end)
        try:
            known = prove(sock, where.name, self._key, PURPOSE, self._runtime.now() + left)
            return Wire(known, Reply, timeout=left)
        except BaseException:
            sock.close()
            raise

    def _recover(self, error: Exception) -> None:
        """Connect again after ``error``, if that may help."""
        self.close()
        if isinstance(error, TimeoutError):
            raise self._silence() from error
        if isinstance(error, ProtocolError):
            raise error
        self._breaks += 1
        if self._breaks > BREAKS:
            raise TaskLostError(
                f"{self.address.name} broke the connection {self._breaks} times in a row",
                "Look at its last lines.",
            ) from error
        self._connect()

    def _silence(self) -> TaskLostError:
        return TaskLostError(
            f"{self.address.name} did not reply within {self._timeout:g} s",
            "It may be stopped: look at its last lines. "
            "SPARTITO_TIMEOUT sets the limit in seconds.",
        )


def _map(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
