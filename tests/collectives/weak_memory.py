"""Shared memory as weak as a processor may make it, for what one of ours does not show.

Each process has a copy of a segment: what it writes is seen by others behind its next release, and
what others have written is seen behind its next acquire. Flags are seen at once: the counters of a
line, and those of a cell of a message. So a fence that is missing, or on the wrong side of its
flag, gives old values.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spartito.backend import machine, mail
from spartito.collectives.memory import memory_operations
from spartito.collectives.memory import rank_memory as memory
from spartito.collectives.memory.segment import Segment
from spartito.system import fences

FLAGS = {0, memory.PART, memory.LEFT, memory.BEAT, memory.BELL, memory.ASLEEP}
"""The numbers of a line that are flags; the others are what a step tells."""
CELL_FLAGS = {mail.NUMBER, mail.TAKEN}
LOOKS = 20
"""How often others may look between a flag and what is behind it."""
RESERVE = 1 << 18
SIZES = 1 << 13, 1 << 12, 1 << 15

_segments: list[WeakSegment] = []
counts = Counter[str]()


class WeakSegment(Segment):
    """A segment of which this process sees its copy."""

    def __init__(self, path: Path, map_: mmap.mmap) -> None:
        super().__init__(path, mmap.mmap(-1, len(map_)))
        self.shared = np.frombuffer(map_, dtype=np.uint8)
        self.own = np.frombuffer(self.map, dtype=np.uint8)
        self.known = np.zeros_like(self.own)  # what both were when they were last the same
        _segments.append(self)

    def publish(self) -> None:
        """Let others see what was written here."""
        new = np.flatnonzero(self.own != self.known)
        self.shared[new] = self.known[new] = self.own[new]

    def refresh(self) -> None:
        """See what others have published, but where something is written here."""
        new = np.flatnonzero(self.shared != self.known)
        new = new[self.own[new] == self.known[new]]
        self.own[new] = self.known[new] = self.shared[new]


class Numbers:
    """The numbers of a segment, of which flags are seen by all at once."""

    def __init__(self, segment: Any, size: int, flags: set[int]) -> None:
        self._size, self._flags = size, flags
        whole = len(segment.own) // 8 * 8
        self._own = segment.own[:whole].view(np.int64)
        self._shared = segment.shared[:whole].view(np.int64)

    def __getitem__(self, index: int) -> int:
        is_flag = index % self._size in self._flags
        return int((self._shared if is_flag else self._own)[index])

    def __setitem__(self, index: int, value: int) -> None:
        is_flag = index % self._size in self._flags
        (self._shared if is_flag else self._own)[index] = value
        for _ in range(LOOKS if is_flag else 0):
            os.sched_yield()


def install() -> None:
    """Have this process see what is shared so, from the next group on."""
    memory.Segment = WeakSegment  # type: ignore[attr-defined]
    memory.numbers_of = lambda segment: Numbers(segment, memory.LINE // 8, FLAGS)  # type: ignore[assignment, return-value]
    memory.CHECK_SECONDS = 0.001  # nobody is woken: the words that wait are copies
    mail.RESERVE = machine.RESERVE = RESERVE  # type: ignore[attr-defined]
    mail.CELLS = 4  # so that cells are used again, and small rows go in parts and chunks
    memory_operations.WHOLE, memory_operations.PART, memory_operations.CHUNK = SIZES


def forget() -> None:
    """Forget the groups before, and how often they called fences."""
    _segments.clear()
    counts.clear()


def stand(without: str = "") -> None:
    """Have fences do what they are to, but for the one that ``without`` names."""

    def fence(name: str, *acts: Callable[[WeakSegment], None]) -> Callable[[], None]:
        def made() -> None:
            counts[name] += 1
            for segment in _segments if name != without else ():
                for act in acts:
                    act(segment)

        return made

    fences.release = fence("release", WeakSegment.publish)
    fences.acquire = fence("acquire", WeakSegment.refresh)
    fences.full = fence("full", WeakSegment.publish, WeakSegment.refresh)


def weaken(messages: Any) -> None:
    """Have the flags of a group's messages seen at once too."""
    found: Any = messages._memory.segment
    messages._words = Numbers(found, mail.CELL, CELL_FLAGS)
