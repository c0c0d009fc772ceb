"""A task's link to one parameter server, which reconnects when the connection breaks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from spartito.errors import TaskLostError, UserError
from spartito.heartbeat import keep_files, last_words
from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.codec import PlainCodec, make_codec
from spartito.ps.protocol.keys import Keys
from spartito.ps.protocol.layout import Span, runs, unused
from spartito.ps.protocol.memory import LOCAL, allocate, areas, dtype_of
from spartito.ps.protocol.messages import (
    PURPOSE,
    Elsewhere,
    Errand,
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
    Stand,
    Standing,
    State,
    Values,
)
from spartito.ps.protocol.runtime import SYSTEM, Channel, Runtime
from spartito.ps.protocol.slots import State as OptimizerState
from spartito.ps.protocol.transfer import MOST_KEYS, state_limit, state_message
from spartito.wire.addresses import split_address
from spartito.wire.dialing import connect_here, dial
from spartito.wire.frames import Gone, ProtocolError, Wire
from spartito.wire.handshake import prove
from spartito.wire.limits import LONG_HEADER, LONG_SILENCE, RETRY_SECONDS
from spartito.wire.secret import NO_SECRET, Key
from spartito.wire.streams import keep_alive

BREAKS = 5
"""How often in a row a server may break the connection without a reply."""


PROBE_SECONDS = 1.0
"""How long a server of two may be silent before the other is asked who is the primary."""


DIAL_SECONDS = 0.1
"""How long one of two servers is dialled before the other is."""


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
    Both ends must know ``key``, the job's secret. Of several ``addresses`` it finds the primary.
    """

    def __init__(
        self, addresses: Sequence[Address], hello: Hello, span: Span, vector: Vector,
        wire_dtype: str | None, timeout: float, key: Key = NO_SECRET, runtime: Runtime = SYSTEM,
    ) -> None:  # fmt: skip
        self.address, self.span, self._key = addresses[0], span, key
        self._addresses, self._term = addresses, 0
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
        self._ended: TaskLostError | None = None
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
    def push_bytes(self) -> int:
        """What a push takes of which nothing is left out."""
        return self._codec.size

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

    def came(self, seconds: float) -> bool:
        """Whether a reply begins within so many seconds, or the connection ends."""
        return self._wire is None or self._wire.ready(seconds)

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

    def fill_model(self, whole: bool = False) -> None:
        """The values that came into the model; ``whole``: also those that it had before."""
        self.incoming.load(None if whole else self._changed)
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

    def end(self, error: TaskLostError) -> None:
        """Close the connection for good: from now on all calls raise ``error``."""
        self._ended = error
        self.close()

    @property
    def _open(self) -> Channel:
        if self._wire is None:
            raise self._ended or TaskLostError(f"{self.address.name} was closed already")
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
                if len(self._addresses) > 1:
                    self._await_primary()
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
        if len(self._addresses) > 1:
            self._await_primary()
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
            except OSError as error:  # it died while we met: it, or the other, may come again
                if self._runtime.now() + RETRY_SECONDS >= end:
                    raise self._silence() from error
                self.address = self._others[0] if len(self._addresses) > 1 else self.address
                self._runtime.sleep(RETRY_SECONDS)

    @property
    def _others(self) -> list[Address]:
        return [address for address in self._addresses if address != self.address]

    def _await_primary(self) -> None:
        """Until something comes; `Gone` where another server has become the primary meanwhile."""
        wire, end = self._open, self._runtime.now() + self._timeout
        while not wire.ready(PROBE_SECONDS) and self._runtime.now() < end:
            standing = self._standing_of(self._others[0])
            if standing is not None and standing.primary and standing.term > self._term:
                raise Gone(f"{self._others[0].name} is the primary now")

    def _standing_of(self, address: Address) -> Standing | None:
        """What a server says that it is; None if it says nothing."""
        end = self._runtime.now() + PROBE_SECONDS
        try:
            wire = self._dial(address, end)
        except (OSError, TaskLostError):
            return None
        try:
            wire.send(replace(self._hello, errand=Errand.WATCH, chief=False))
            wire.send(Stand())
            reply = wire.receive()
        except (OSError, ProtocolError):
            return None
        finally:
            wire.close()
        return reply if isinstance(reply, Standing) else None

    def _connect_once(self, end: float) -> None:
        """Connect and say hello once; `Restarted` if it is another process than last time."""
        where = self.address
        if len(self._addresses) > 1:
            wire = self._dial_soon(where, end)
        else:
            wire = self._dial(where, end)
        try:
            wire.send(self._hello)
            welcome = self._checked(wire.receive())
            if isinstance(welcome, Elsewhere):
                raise Gone(f"{where.name} is not the primary")
            self._shared = bool(welcome.segment)
            keep_files([where.name])
            if self._shared:
                push_at, pull_at, size = areas(self.span)
                memory = _map(Path(welcome.segment), size)
                local = connect_here(welcome.socket)
                remote, wire = wire, Wire(local, Reply)
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
        self.outgoing = SpanCopies(self._vector, self.span, push)
        self.incoming = SpanCopies(self._vector, self.span, pull)
        self.ready, self._term = welcome.ready, welcome.term
        before, self.incarnation = self.incarnation, welcome.incarnation
        if before and before != self.incarnation:
            self._breaks = 0
            raise Restarted(where.name)

    def _dial_soon(self, where: Address, end: float) -> Channel:
        """As `_dial`, but an `OSError` if that takes long: the other server may be there."""
        soon = min(end, self._runtime.now() + PROBE_SECONDS)
        try:
            return self._dial(where, soon, DIAL_SECONDS)
        except TaskLostError as error:
            raise Gone(str(error)) from error

    def _dial(self, where: Address, end: float, most: float = inf) -> Channel:
        """A connection to a server, both ends of which know the secret.

        If it does not listen within ``most`` seconds it is `TaskLostError`.
        """
        now = self._runtime.now()
        left = max(RETRY_SECONDS, end - now)
        sock = dial(where.host, where.port, where.name, self._timeout, min(end, now + most))
        try:
            known = prove(sock, where.name, self._key, PURPOSE, self._runtime.now() + left)
            keep_alive(known, LONG_SILENCE)
            return Wire(known, Reply, timeout=left)
        except BaseException:
            sock.close()
            raise

    def _recover(self, error: Exception) -> None:
        """Connect again after ``error``, if that may help."""
        self.close()
        if self._ended is not None:
            raise self._ended from error
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
            f"{self.address.name} did not reply within {self._timeout:g} s"
            + last_words(self.address.name),
            "It may be stopped: look at its last lines. "
            "SPARTITO_TIMEOUT sets the limit in seconds.",
        )


def _map(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
