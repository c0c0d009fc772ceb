"""A task's side of the parameter servers: a link to each, and all of them as one."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from spartito.cluster.spec import split_address
from spartito.collectives.sockets import dial
from spartito.errors import TaskLostError, UserError
from spartito.ps.codec import make_codec
from spartito.ps.connection import STATE_ROOM, areas
from spartito.ps.keys import Keys
from spartito.ps.layout import Span
from spartito.ps.messages import (
    Answer,
    Applied,
    GetApplied,
    GetState,
    Hello,
    Load,
    LoadState,
    Lost,
    Message,
    Pull,
    Push,
    Refused,
    Release,
    State,
    Values,
    Welcome,
)
from spartito.ps.shard import State as OptimizerState
from spartito.ps.vector import Copies, Vector, allocate, dtype_of
from spartito.ps.wire import Gone, ProtocolError, Wire


class Restarted(Exception):
    """A server was started again: what it had been told since its snapshot is forgotten."""


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
    """

    def __init__(
        self, address: Address, hello: Hello, span: Span, vector: Vector, wire_dtype: str | None,
        timeout: float,
    ) -> None:  # fmt: skip
        self.address, self.span = address, span
        self._hello, self._timeout = hello, timeout
        self._vector = vector
        self._codec = make_codec(vector.layout, span, wire_dtype)
        self._sent = self._received = 0
        self._wire: Wire | None = None
        self._shared = False
        self.push, self.pull = torch.empty(0), torch.empty(0)
        self.life = ""
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
        try:
            has_gradient = isinstance(message, Push) and not message.dropped
            if has_gradient and not self._shared:
                self._open.send(message, self._codec.encode(self.push))
            else:
                self._open.send(message)
                self._sent += has_gradient * self.span.size
        except (Gone, TimeoutError, ProtocolError) as error:
            self._broken(error, message)

    def receive(self, asked: Message) -> Any:
        """The answer to ``asked``, with values in ``pull`` if there were any."""
        while True:
            try:
                answer = self._checked(self._receive())
            except (Gone, TimeoutError, ProtocolError) as error:
                self._broken(error, asked)
            else:
                return answer

    def ask(self, message: Message) -> Any:
        """Send, and receive."""
        self.send(message)
        return self.receive(message)

    def load(self, load: Load, values: Tensor, state: OptimizerState) -> None:
        """Give the server its values and the optimizer's tensors."""
        self._open.send(load, values.numpy().data)
        for (slot, key), value in state.items():
            data = value.detach().reshape(-1).contiguous().view(torch.uint8)
            dtype = str(value.dtype).removeprefix("torch.")
            self._open.send(LoadState(slot, key, dtype, not value.dim()), data.numpy().data)
        self._checked(self._open.receive())

    def state(self) -> tuple[Tensor, OptimizerState]:
        """The server's values, uint8 ``(bytes,)``, and the optimizer's tensors."""
        self._open.send(GetState())
        head: State = self._checked(self._open.receive())
        values = allocate(self.span)
        values.copy_(torch.frombuffer(bytearray(self._open.payload), dtype=torch.uint8))
        found: OptimizerState = {}
        for _ in range(head.tensors):
            part: LoadState = self._checked(self._open.receive())
            data = torch.frombuffer(bytearray(self._open.payload), dtype=dtype_of(part.dtype))
            found[part.slot, part.key] = data[0] if part.scalar else data
        return values, found

    def applied(self, slices: int) -> Keys:
        """Which pieces the server has applied."""
        answer: Applied = self.ask(GetApplied())
        bits, at, dumped = bytes(self._open.payload), 0, {}
        for name, size in answer.passes:
            dumped[name] = bits[at : at + size]
            at += size
        return Keys.load(slices, dumped)

    def close(self) -> None:
        """Leave. Calling it again changes nothing."""
        if self._wire is not None:
            self._sent, self._received = self.sent, self.received
            self._wire.close()
            self._wire = None

    @property
    def _open(self) -> Wire:
        if self._wire is None:
            raise TaskLostError(f"{self.address.name} was left already")
        return self._wire

    def _receive(self) -> Any:
        room = None if self._shared else self._codec.room(self.pull)
        answer = self._open.receive(room)
        if isinstance(answer, Values):
            if self._shared:
                self._received += self.span.size
            elif len(self._open.payload):
                self._codec.decode(self.pull)
        return answer

    def _checked(self, answer: Any) -> Any:
        if isinstance(answer, Refused):
            if answer.lost:
                raise TaskLostError(answer.why, answer.advice)
            raise UserError(answer.why, answer.advice)
        return answer

    def _connect(self) -> None:
        where = self.address
        wire = Wire(dial(where.host, where.port, where.name, self._timeout), Answer)
        wire.timeout = self._timeout
        wire.send(self._hello)
        welcome: Welcome = self._checked(wire.receive())
        self._shared = bool(welcome.segment)
        if self._shared:
            push_at, pull_at, size = areas(self.span)
            memory = _map(Path(welcome.segment), size)
            local = socket.socket(socket.AF_UNIX)
            local.connect(welcome.socket)
            wire.close()
            wire = Wire(local, Answer, timeout=self._timeout)
            push = torch.frombuffer(memory, dtype=torch.uint8)[push_at:][: self.span.size]
            pull = torch.frombuffer(memory, dtype=torch.uint8)[pull_at:][: self.span.size]
        else:
            push, pull = allocate(self.span), allocate(self.span)
        wire.limit = STATE_ROOM * self.span.size + (1 << 20)
        if self.push.numel():
            push.copy_(self.push)
            pull.copy_(self.pull)
        self.push, self.pull, self._wire = push, pull, wire
        self.outgoing = Copies(self._vector, self.span, push)
        self.incoming = Copies(self._vector, self.span, pull)
        self.ready = welcome.ready
        before, self.life = self.life, welcome.life
        if before and before != self.life:
            raise Restarted(where.name)

    def _broken(self, error: Exception, message: Message) -> None:
        """Connect again, and say ``message`` once more, which changes nothing if it was heard."""
        if isinstance(error, TimeoutError):
            raise TaskLostError(
                f"{self.address.name} did not answer within {self._timeout:g} s; "
                "its connection stands",
                "It may be stopped. SPARTITO_TIMEOUT sets the limit in seconds.",
            ) from error
        if isinstance(error, ProtocolError):
            raise error
        self.close()
        self._connect()
        self.send(message)


def _map(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


class Servers:
    """All servers of the job as one: what they hold together is the whole vector.

    ``ordered`` holds where the first server decides who may go on: it is asked first for values
    and told last of gradients, so that none gets staler on the others than on it.
    """

    def __init__(self, links: Sequence[Link], vector: Vector, ordered: bool) -> None:
        self.links, self.vector = list(links), vector
        self._ordered = ordered and len(links) > 1
        self._sent: list[Push] = []
        self._versions = [0] * len(self.links)
        self.far = Values(0, 0, 0, 0)
        """How far the first server is."""

    @torch.no_grad()
    def fill(self) -> tuple[list[list[int]], bool]:
        """The model's gradients into the links' memory: which are absent, and if all are finite."""
        absent = [link.outgoing.store_gradients() for link in self.links]
        for link in self.links:
            link.outgoing.store_changes(link.incoming)
        return absent, all(link.outgoing.is_finite() for link in self.links)

    def push(self, push: Push, absent: Sequence[Sequence[int]]) -> None:
        """Send what `fill` stored, and ask for new values; `answers` waits for them.

        Raises `Restarted` when a server has forgotten what it knew; nothing is left to wait for.
        """
        self._sent = [
            replace(push, pulled=version, absent=list(missing))
            for version, missing in zip(self._versions, absent, strict=True)
        ]
        if self._ordered:
            others = [replace(push, pull=False) for push in self._sent[1:]]
            self._exchange(self.links[1:], others)
            self.links[0].send(self._sent[0])
        else:
            self._send(self.links, self._sent)

    def answers(self) -> list[Values]:
        """What the servers say to the last `push`, with the new values in the model."""
        if self._ordered:
            found = [self.links[0].receive(self._sent[0]), *self._look(self.links[1:])]
        else:
            found = self._receive(self.links, self._sent)
        self._take(found)
        return found

    def get(self, admit: bool) -> None:
        """The newest values into the model; ``admit`` to compute with, so it may have to wait."""
        first = self.links[0].ask(Pull(admit))
        self._take([first, *self._look(self.links[1:])])

    def release(self) -> None:
        """Say that nothing is computed here for now."""
        self.links[0].ask(Release())

    def close(self) -> None:
        """Leave all."""
        for link in self.links:
            link.close()

    def _look(self, links: Sequence[Link]) -> list[Values]:
        return self._exchange(links, [Pull(admit=False)] * len(links))

    def _exchange(self, links: Sequence[Link], messages: Sequence[Message]) -> list[Values]:
        self._send(links, messages)
        return self._receive(links, messages)

    def _send(self, links: Sequence[Link], messages: Sequence[Message]) -> None:
        """Send to all; if one was restarted hear the others out, so that none has to say more."""
        heard: list[tuple[Link, Message]] = []
        restarted: Restarted | None = None
        for link, message in zip(links, messages, strict=True):
            try:
                link.send(message)
                heard.append((link, message))
            except Restarted as error:
                restarted = error
        if restarted is not None:
            self._hear(heard)
            raise restarted

    def _receive(self, links: Sequence[Link], messages: Sequence[Message]) -> list[Values]:
        found, restarted = self._hear(list(zip(links, messages, strict=True)))
        if restarted is not None:
            raise restarted
        return found

    def _hear(self, asked: Sequence[tuple[Link, Message]]) -> tuple[list[Values], Restarted | None]:
        found: list[Values] = []
        restarted: Restarted | None = None
        for link, message in asked:
            try:
                found.append(link.receive(message))
            except Restarted as error:
                restarted = error
        return found, restarted

    @torch.no_grad()
    def _take(self, found: Sequence[Values]) -> None:
        self._versions = [values.version for values in found]
        self.far = found[0]
        for link in self.links:
            link.incoming.load()


class Control:
    """The chief's own links to the servers, for what is not about gradients; thread-safe.

    ``on_restart`` is called with the number of a server that was started again.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = list(links)
        self._turn = threading.Lock()
        self._lost: deque[Lost] = deque(maxlen=64)
        self.restarted: set[int] = set()

    def tell(self, message: Message) -> list[Any]:
        """Ask every server the same; answers in their order."""
        with self._turn:
            return [self._ask(number, message) for number in range(len(self.links))]

    def lose(self, lost: Lost) -> None:
        """Tell the servers that a worker is gone, and those that are started again later too."""
        with self._turn:
            self._lost.append(lost)
            for number in range(len(self.links)):
                self._ask(number, lost)

    def applied(self, number: int, slices: int) -> Keys:
        """Which pieces a server has applied."""
        with self._turn:
            return self.links[number].applied(slices)

    def load(self, job: str, values: Sequence[Tensor], states: Sequence[OptimizerState],
             settings: list[dict[str, Any]]) -> None:  # fmt: skip
        """Give every server its values and the state of its optimizer."""
        with self._turn:
            for link, own, state in zip(self.links, values, states, strict=True):
                link.load(Load(job, settings, len(state)), own, state)

    def states(self) -> list[tuple[Tensor, OptimizerState]]:
        """Every server's values and the state of its optimizer."""
        with self._turn:
            return [link.state() for link in self.links]

    def close(self) -> None:
        """Leave all."""
        with self._turn:
            for link in self.links:
                link.close()

    def _ask(self, number: int, message: Message) -> Any:
        link = self.links[number]
        try:
            return link.ask(message)
        except Restarted:
            self.restarted.add(number)
            for lost in self._lost:
                link.ask(lost)
            return link.ask(message)
