"""Connections in memory: messages arrive in order, late by seed, and connections break by seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec
from greenlet import GreenletExit

from spartito.wire.frames import Gone, ProtocolError
from tests.ps.simulation.scheduler import Process, Simulation, Task

ENCODE = msgspec.msgpack.Encoder().encode
DECODERS: dict[Any, Callable[[bytes], Any]] = {}


def decoder(accepts: Any) -> Callable[[bytes], Any]:
    if accepts not in DECODERS:
        DECODERS[accepts] = msgspec.msgpack.Decoder(accepts).decode
    return DECODERS[accepts]


@dataclass
class Faults:
    """What goes wrong on the network, until ``calm``."""

    latency: float = 0.01
    lose: float = 0.0
    """How often a message is lost together with its connection."""
    cut: float = 0.0
    """How often a connection breaks once a message has arrived: its reply is lost."""
    calm: float = 0.0
    partitions: tuple[tuple[float, float, frozenset[str]], ...] = ()
    """From when to when these processes reach only each other."""


class End:
    """One end of a connection, as `Channel`."""

    def __init__(self, network: Network, process: Process, accepts: Any, limit: int) -> None:
        self.network, self.process = network, process
        self.limit, self.header_limit = limit, 0
        self.sent = self.received = 0
        self.payload = memoryview(b"")
        self.timeout: float | None = None
        self.peer: End | None = None
        self.closed = False  # here
        self.over_at = inf  # when nothing more comes than what is in the inbox
        self._decode = decoder(accepts)
        self._inbox: deque[tuple[float, bytes, bytes]] = deque()
        self._waiting: Task | None = None
        self._last = 0.0

    @property
    def over(self) -> bool:
        """Whether nothing more comes than what is in the inbox."""
        return self.over_at <= self.network.simulation.now

    def send(self, message: Any, *payload: Any) -> None:
        if self.process.dead():
            raise GreenletExit
        if self.closed or self.over:
            raise Gone("the connection is closed")
        data = b"".join(bytes(memoryview(part)) for part in payload)
        self.sent += len(data)
        assert self.peer is not None
        self.network.deliver(self, self.peer, ENCODE(message), data)

    def receive(self, into: memoryview | None = None) -> Any:
        simulation = self.network.simulation
        end = None if self.timeout is None else simulation.now + self.timeout
        while True:
            if self.process.dead():
                raise GreenletExit
            if self.closed:
                raise Gone("this end was closed")
            head = self._inbox[0][0] if self._inbox else None
            if head is not None and head <= simulation.now:
                break
            if head is None and self.over:
                raise Gone("the other end closed the connection")
            if end is not None and simulation.now >= end:
                raise TimeoutError("nothing came")
            ends = inf if self.over else self.over_at
            until = min(inf if at is None else at for at in (head, end, ends))
            self._waiting = simulation.current
            simulation.park(None if until == inf else until - simulation.now)
            self._waiting = None
        _, header, data = self._inbox.popleft()
        message = self._decode(header)
        if into is not None and len(data) == into.nbytes:
            self.payload = into.cast("B")
            self.payload[:] = data
        elif len(data) > self.limit:
            raise ProtocolError(f"{len(data)} bytes of payload, more than {self.limit}")
        else:
            self.payload = memoryview(bytearray(data))
        self.received += len(data)
        return message

    def ready(self, seconds: float) -> bool:
        simulation = self.network.simulation
        end = simulation.now + seconds
        while not (self.closed or self.over or self._has_come()):
            if simulation.now >= end:
                return False
            self._waiting = simulation.current
            head = self._inbox[0][0] if self._inbox else end
            simulation.park(min(end, head, self.over_at) - simulation.now)
            self._waiting = None
        return True

    def _has_come(self) -> bool:
        return bool(self._inbox) and self._inbox[0][0] <= self.network.simulation.now

    def set_timeouts(self, *, send: float | None, receive: float | None) -> None:
        self.timeout = receive

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.wake()
            if self.peer is not None:
                self.peer.finish(0.0)

    def arrive(self, at: float, header: bytes, data: bytes) -> None:
        self._last = max(self._last, at)  # in the order of sending
        self._inbox.append((self._last, header, data))
        self.wake()

    def finish(self, lost: float) -> None:
        """The other end is gone; each message under way is lost with this probability."""
        random = self.network.simulation.random
        kept = len(self._inbox)
        while kept and self._inbox[kept - 1][0] > self.network.simulation.now:
            if random.random() >= lost:
                break
            kept -= 1
        while len(self._inbox) > kept:
            self._inbox.pop()
        assert self.peer is not None
        heals = self.network.heals(self.process, self.peer.process)
        self.over_at = min(self.over_at, max(heals, self.network.simulation.now))
        self.wake()

    def wake(self) -> None:
        if self._waiting is not None:
            self.network.simulation.wake(self._waiting)


@dataclass
class Network:
    """Who listens where, and what happens to messages."""

    simulation: Simulation
    faults: Faults
    listeners: dict[str, tuple[Process, Callable[[End], None], Any]] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)

    def listen(
        self, name: str, process: Process, serve: Callable[[End], None], accepts: Any
    ) -> None:
        self.listeners[name] = process, serve, accepts

    def connect(self, process: Process, name: str, accepts: Any, limit: int = 0) -> End:
        """A connection to who listens under ``name``; `OSError` if nobody does."""
        if process.dead():
            raise GreenletExit
        found = self.listeners.get(name)
        if found is None or found[0].dead() or found[0].ended:
            raise ConnectionRefusedError(f"nobody listens as {name}")
        listener, serve, expected = found
        if self.heals(process, listener):
            raise TimeoutError(f"{name} is cut off")
        here, there = End(self, process, accepts, limit), End(self, listener, expected, 0)
        here.peer, there.peer = there, here
        there.timeout = 5.0
        for end in (here, there):
            self.ends.append(end)
            end.process.at_death.append(lambda end=end: self._died(end))  # type: ignore[misc]
        task = listener.start(lambda: serve(there), f"serves {process.name}")
        task.client = process
        return here

    def heals(self, one: Process, other: Process) -> float:
        """When no partition is between them any more; 0 if there is none now."""
        now = self.simulation.now
        return max(
            (
                end for begin, end, alone in self.faults.partitions
                if begin <= now < end and (one.name in alone) != (other.name in alone)
            ),
            default=0.0,
        )  # fmt: skip

    def deliver(self, sender: End, receiver: End, header: bytes, data: bytes) -> None:
        random, faults, now = self.simulation.random, self.faults, self.simulation.now
        if faults.partitions:  # the system sends it once more until it comes
            now = max(now, self.heals(sender.process, receiver.process))
        drawn = random.random() if now < faults.calm else 1.0
        if drawn < faults.lose:
            self._break(sender, receiver)
            return
        receiver.arrive(now + random.random() * faults.latency, header, data)
        if drawn < faults.lose + faults.cut:
            sender.finish(1.0)
            receiver.over_at = min(receiver.over_at, self.simulation.now)
            receiver.wake()

    def _break(self, *ends: End) -> None:
        for end in ends:
            end.finish(1.0)

    def _died(self, end: End) -> None:
        end.closed = True
        if end.peer is not None:
            end.peer.finish(self.simulation.random.choice([0.0, 0.5, 1.0]))
