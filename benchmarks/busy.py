"""Who computes while a benchmark runs: the CPU time of processes by kind, as Linux counts it."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

EVERY = 1.0
TICKS = os.sysconf("SC_CLK_TCK")

Seen = dict[int, tuple[str, float]]
"""The kind and the CPU seconds of each process."""


class Busy:
    """Looks at the processes of this machine while it is entered, a few milliseconds each time.

    Args:
        kind_of: What a process with this command line is; "" leaves it out.
    """

    def __init__(self, kind_of: Callable[[str], str]) -> None:
        self._kind_of = kind_of
        self._found: list[tuple[float, Seen]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def cores(self, begin: float, end: float) -> dict[str, float]:
        """The cores that each kind kept busy between two times of `time.time`."""
        found = [(when, seen) for when, seen in self._found if begin <= when <= end]
        if len(found) < 2:
            return {}
        total: dict[str, float] = {}
        for (_, before), (_, after) in itertools.pairwise(found):
            for pid, (kind, seconds) in after.items():
                more = seconds - before.get(pid, ("", 0.0))[1]
                total[kind] = total.get(kind, 0.0) + max(0.0, more)
        took = found[-1][0] - found[0][0]
        return {kind: seconds / took for kind, seconds in total.items()}

    def _look(self) -> None:
        while not self._over.wait(EVERY):
            self._found.append((time.time(), self._seen()))

    def _seen(self) -> Seen:
        seen: Seen = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                kind = self._kind_of(words.decode(errors="replace").strip())
                if kind:
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    seen[int(folder.name)] = kind, (int(fields[11]) + int(fields[12])) / TICKS
        return seen
