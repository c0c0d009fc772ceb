"""How busy the machine was during a run, and how much of that was the run itself."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from spartito.system import PROC, affinity
from spartito.system.capacity import available_cores

_STAT, _PRESSURE = PROC / "stat", PROC / "pressure/cpu"
_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7
"""Columns of /proc/stat. Interrupts are left out: they are of whoever sends and receives."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the kernel has counted so far, in seconds.

    Attributes:
        time: Of the machine's monotonic clock.
        busy: In which our cores computed for anybody, or were taken by other virtual machines.
        own: In which processes computed that we started and that have ended.
        pressure: In which something waited for a core; None where the kernel does not count it.
    """

    time: float
    busy: float
    own: float
    pressure: float | None


@dataclass(frozen=True, slots=True)
class Load:
    """The load of the machine during a run.

    Attributes:
        others: The part of the cores that we may use which other programs took, from 0 to 1.
        own: How many cores the run kept busy, on average.
        pressure: The part of the time in which something waited for a core, ours too; None where
            the kernel does not count it.
    """

    others: float
    own: float
    pressure: float | None

    def record(self) -> dict[str, float | None]:
        """As ``compare.json`` has it."""
        return asdict(self)


def read_load() -> Reading | None:
    """What the kernel has counted until now; None where it does not tell."""
    try:
        busy = busy_seconds(_STAT.read_text(), affinity(), os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError):
        return None
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        pressure = pressure_seconds(_PRESSURE.read_text())
    except (OSError, ValueError):
        pressure = None
    return Reading(time.monotonic(), busy, usage.ru_utime + usage.ru_stime, pressure)


def load_between(first: Reading | None, last: Reading | None) -> Load | None:
    """The load between two readings; None where one is missing."""
    if first is None or last is None or last.time <= first.time:
        return None
    return load_of(first, last, len(affinity()), available_cores())


def load_of(first: Reading, last: Reading, cores: int, ours: int) -> Load:
    """The load between two readings.

    Where a container may use fewer cores than it sees, others disturb it only with what does not
    fit beside it.

    Args:
        first: At the beginning.
        last: At the end.
        cores: The cores that were read.
        ours: So many of them we may use at a time.
    """
    seconds = last.time - first.time
    own = (last.own - first.own) / seconds
    others = (last.busy - first.busy) / seconds - own
    taken = min(max(0.0, others + ours - cores), float(ours)) / ours
    known = first.pressure is not None and last.pressure is not None
    pressure = ((last.pressure or 0.0) - (first.pressure or 0.0)) / seconds if known else None
    return Load(taken, own, pressure)


def busy_seconds(text: str, cores: Iterable[int], ticks: int) -> float:
    """Seconds in which ``cores`` were busy or stolen, from /proc/stat with ``ticks`` a second.

    Raises `ValueError` where a core is not there.
    """
    lines = (line.split() for line in text.splitlines())
    found = {words[0]: words[1:] for words in lines if words and words[0].startswith("cpu")}
    total = 0
    for core in cores:
        columns = found.get(f"cpu{core}")
        if columns is None:
            raise ValueError(f"the kernel counts no core {core}")
        total += sum(int(columns[one]) for one in (_USER, _NICE, _SYSTEM, _STEAL))
    return total / ticks


def pressure_seconds(text: str) -> float:
    """Seconds in which something waited for a core, from /proc/pressure/cpu.

    Raises `ValueError` where it says nothing of that.
    """
    for line in text.splitlines():
        kind, *pairs = line.split()
        if kind == "some":
            values = dict(pair.split("=", 1) for pair in pairs)
            return int(values.get("total", "")) / 1e6
    raise ValueError("no line says 'some'")
