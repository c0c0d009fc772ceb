"""From this task to another: does it answer, how soon, how fast, and what time is it there?"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from spartito.cluster.secret import NO_SECRET
from spartito.doctor.transport.connection import (
    ClosedError,
    GarbageError,
    OutsiderError,
    Talk,
    call,
    meet,
)
from spartito.doctor.transport.messages import OK, Knocked, Ping, Pong, Push, Speed, Target

PINGS, LEAST_PINGS = 20, 4
PING_SECONDS = 0.02
"""Small messages of a pair: so many, or for so long; one may meet a task whose quota is spent."""

PUSHES = tuple(size << 10 for size in (64, 256, 1024, 2048))
PUSH_SECONDS = 0.05
"""Bytes of a pair: growing, until one takes so long."""

ZEROS = memoryview(bytes(PUSHES[-1]))

A = TypeVar("A")
B = TypeVar("B")


def at_once(work: Callable[[A], B], items: Sequence[A], end: float) -> list[B | None]:
    """``work`` on all ``items`` at the same time; None for what has not ended at ``end``.

    Its threads may live on behind a call that the system does not let go (a name's resolution);
    they never keep the process from ending.
    """
    results: list[B | None] = [None] * len(items)

    def run(place: int, item: A) -> None:
        results[place] = work(item)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return list(results)


def knock_all(
    source: str, targets: Sequence[Target], seconds: float, key: bytes = NO_SECRET
) -> list[Knocked]:
    """Connect to all ``targets``, which know ``key``, at the same time."""
    end = time.monotonic() + seconds
    found = at_once(lambda target: knock(source, target, end, key), targets, end + 0.2)
    return [
        result or _knocked(source, target, "unresolved", "no answer from the name service")
        for target, result in zip(targets, found, strict=True)
    ]


def knock(source: str, target: Target, end: float, key: bytes = NO_SECRET) -> Knocked:
    """Ask the doctor of ``target`` who it is."""
    try:
        talk = call(target.host, target.port, end)
    except OSError as error:
        return _knocked(source, target, _why_not_connected(error), str(error))
    with talk:
        try:
            talk.prove(key, end)
            talk.say(Ping(), end)
            answer: Pong = talk.hear(Pong, end)
        except TimeoutError:
            return _knocked(source, target, "silent")
        except OutsiderError:
            return _knocked(source, target, "outsider")
        except GarbageError as error:
            return _knocked(source, target, "stranger", str(error))
        except OSError as error:
            return _knocked(source, target, "closed", str(error))
    if answer.task != target.task:
        return _knocked(source, target, "wrong task", answer.task)
    return _knocked(source, target, OK)


def measure(source: str, target: Target, seconds: float, key: bytes = NO_SECRET) -> Speed | None:
    """Latency, bandwidth and clock of the way to ``target``; None when it does not answer."""
    end = time.monotonic() + seconds
    try:
        with meet(target.host, target.port, end, key) as talk:
            latency, clock = _latency(talk, end)
            return Speed(source, target.task, latency, _bandwidth(talk, latency, end), clock)
    except (OSError, GarbageError):
        return None  # the report says that this pair has no figures


def _latency(talk: Talk, end: float) -> tuple[float, float]:
    """The fastest round trip, and by how much the other clock is ahead, as NTP finds it."""
    best: tuple[float, float] | None = None
    until = time.monotonic() + PING_SECONDS
    for count in range(PINGS):
        asked, began = time.time(), time.perf_counter()
        talk.say(Ping(), end)
        answer: Pong = talk.hear(Pong, end)
        took = time.perf_counter() - began
        if best is None or took < best[0]:
            best = took, answer.clock - (asked + took / 2)
        if time.monotonic() > until and count + 1 >= LEAST_PINGS:
            break
    if best is None:
        raise ClosedError("no ping")
    return best


def _bandwidth(talk: Talk, latency: float, end: float) -> float:
    """Bytes per second of the last and largest of `PUSHES` that time allows."""
    speed = 0.0
    for size in PUSHES:
        began = time.perf_counter()
        talk.say(Push(size), end, ZEROS[:size])
        talk.hear(Pong, end)
        took = time.perf_counter() - began
        # The answer's way back is no part of it, and never most of it.
        speed = max(speed, size / max(took - latency / 2, took / 2))
        if took > PUSH_SECONDS:
            break
    return speed


def _knocked(source: str, target: Target, how: str, detail: str = "") -> Knocked:
    return Knocked(source, target.task, f"{target.host}:{target.port}", how, detail)


def _why_not_connected(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "unresolved"
    if isinstance(error, TimeoutError):
        return "dropped"
    if error.errno == errno.ECONNREFUSED:
        return "refused"
    return "unroutable"
