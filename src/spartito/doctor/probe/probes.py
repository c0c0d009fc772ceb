"""From this task to another: does it respond, how soon, how fast, and what time is it there?"""

from __future__ import annotations

import time
from collections.abc import Sequence

from spartito.doctor.findings import Outcome, Probe, Speed, Target
from spartito.doctor.parallel import at_once
from spartito.doctor.transport.connection import Connection, PeerError, connect
from spartito.doctor.transport.messages import (
    MOST_BYTES,
    Data,
    Measured,
    Order,
    Ping,
    Pong,
    Probed,
    ProbeOrder,
)
from spartito.wire.secret import NO_SECRET, Key

PINGS, LEAST_PINGS = 20, 4
PING_SECONDS = 0.02
"""Small messages of a pair: so many, or for so long; one may meet a task whose quota is spent."""

SIZES = (2 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, MOST_BYTES)
DATA_SECONDS = 0.05
"""Bytes of a pair: growing, until one message takes so long. The first need two packets, or two of
the largest that there are."""

FEW = 64 << 10
"""The speed of fewer bytes counts only where no more arrive, and those take far longer than a small
message."""

PROBE_PART = 0.3
"""The part of a measurement's time that is left to see whether small messages arrive."""

ZEROS = memoryview(bytes(MOST_BYTES))


def carry_out(order: Order, task: str, key: Key) -> Probed | Measured:
    """Do as task ``task`` what the coordinator orders."""
    if isinstance(order, ProbeOrder):
        return Probed(probe_all(task, order.targets, order.seconds, key))
    return measure(task, order.target, order.seconds, key)


def probe_all(
    source: str, targets: Sequence[Target], seconds: float, key: Key = NO_SECRET
) -> list[Probe]:
    """Connect to all ``targets``, which know ``key``, at the same time."""
    end = time.monotonic() + seconds
    found = at_once(lambda target: probe(source, target, end, key), targets, end + 0.2)
    late = Outcome.UNRESOLVED, "no response from the name service"
    return [
        result or Probe(source, target.task, target.address, *late)
        for target, result in zip(targets, found, strict=True)
    ]


def probe(source: str, target: Target, end: float, key: Key = NO_SECRET) -> Probe:
    """Ask the doctor of ``target`` who it is."""
    try:
        with connect(target, end, key) as connection:
            connection.send(Ping(), end)
            task = connection.receive(Pong, end).task
    except PeerError as error:
        return Probe(source, target.task, target.address, error.outcome, error.detail)
    outcome = Outcome.OK if task == target.task else Outcome.OTHER_TASK
    detail = "" if outcome is Outcome.OK else task
    return Probe(source, target.task, target.address, outcome, detail)


def measure(source: str, target: Target, seconds: float, key: Key = NO_SECRET) -> Measured:
    """Latency, bandwidth and clock of the connection to ``target``.

    Where a message does not arrive, it is seen whether small ones do at the same time: else nobody
    responds at all.
    """
    began = time.monotonic()
    end, stuck = began + (1 - PROBE_PART) * seconds, SIZES[0]
    try:
        with connect(target, end, key, large=True) as connection:
            latency, clock = _latency(connection, end)
            bandwidth, stuck = _bandwidth(connection, latency, end)
            if bandwidth:
                return Measured(Speed(source, target.task, latency, bandwidth, clock))
    except PeerError:
        pass  # maybe as large packets are needed already to prove who one is
    return Measured(None, stuck if probe(source, target, began + seconds, key).ok else 0)


def _latency(connection: Connection, end: float) -> tuple[float, float]:
    """The fastest round trip, and by how much the other clock is ahead, as NTP finds it."""
    trips: list[tuple[float, float]] = []
    until = time.monotonic() + PING_SECONDS
    while len(trips) < PINGS and (len(trips) < LEAST_PINGS or time.monotonic() <= until):
        asked, began = time.time(), time.perf_counter()
        connection.send(Ping(), end)
        clock = connection.receive(Pong, end).clock
        took = time.perf_counter() - began
        trips.append((took, clock - (asked + took / 2)))
    return min(trips)


def _bandwidth(connection: Connection, latency: float, end: float) -> tuple[float, int]:
    """Bytes per second of the fastest of `SIZES` that time allows, and which one did not arrive."""
    speed = guess = 0.0
    for size in SIZES:
        if guess and size / guess > end - time.monotonic():
            break
        began = time.perf_counter()
        try:
            connection.send(Data(), end, ZEROS[:size])
            connection.receive(Pong, end)
        except PeerError:
            return speed or guess, size
        took = time.perf_counter() - began
        # The reply's way back is no part of it, and never most of it.
        found = size / max(took - latency / 2, took / 2)
        if size >= FEW:
            speed = guess = max(speed, found)
            if took > DATA_SECONDS:
                break
        elif took > 4 * latency:
            guess = found
    return speed or guess, 0
