"""From this task to another: does it respond, how soon, how fast, and what time is it there?"""

from __future__ import annotations

import time
from collections.abc import Sequence

from spartito.cluster.secret import NO_SECRET, Key
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

PINGS, LEAST_PINGS = 20, 4
PING_SECONDS = 0.02
"""Small messages of a pair: so many, or for so long; one may meet a task whose quota is spent."""

SIZES = (64 << 10, 256 << 10, 1 << 20, MOST_BYTES)
DATA_SECONDS = 0.05
"""Bytes of a pair: growing, until one message takes so long."""

ZEROS = memoryview(bytes(MOST_BYTES))


def carry_out(order: Order, task: str, key: Key) -> Probed | Measured:
    """Do as task ``task`` what the coordinator orders."""
    if isinstance(order, ProbeOrder):
        return Probed(probe_all(task, order.targets, order.seconds, key))
    return Measured(measure(task, order.target, order.seconds, key))


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


def measure(source: str, target: Target, seconds: float, key: Key = NO_SECRET) -> Speed | None:
    """Latency, bandwidth and clock of the connection to ``target``; None without a response."""
    end = time.monotonic() + seconds
    try:
        with connect(target, end, key) as connection:
            latency, clock = _latency(connection, end)
            bandwidth = _bandwidth(connection, latency, end)
            return Speed(source, target.task, latency, bandwidth, clock)
    except PeerError:
        return None  # the report says that this pair has no figures


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


def _bandwidth(connection: Connection, latency: float, end: float) -> float:
    """Bytes per second of the fastest of `SIZES` that time allows."""
    speed = 0.0
    for size in SIZES:
        began = time.perf_counter()
        connection.send(Data(size), end, ZEROS[:size])
        connection.receive(Pong, end)
        took = time.perf_counter() - began
        # The reply's way back is no part of it, and never most of it.
        speed = max(speed, size / max(took - latency / 2, took / 2))
        if took > DATA_SECONDS:
            break
    return speed
