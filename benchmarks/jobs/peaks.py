"""The most memory that a process has, and what it consists of then."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from pathlib import Path


class PeakMemory:
    """The most memory that this process has from now on: resident, and with shared pages divided.

    The kernel keeps the highest resident size; the divided one is looked at every 5 ms, and what
    it consists of where it has grown by 1 MiB. ``known`` tells of parts of it, in bytes.
    """

    def __init__(self, known: Callable[[], Mapping[str, int]]) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._known = known
        self._before, self._parts = _status("VmRSS"), _parts()
        self._first = self._highest = self._looked = _divided()
        self._at_peak: dict[str, float] = dict(self._parts)
        self._named: dict[str, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def end(self) -> dict[str, float]:
        """MiB beyond the beginning; what ``known`` tells lies in the parts before it."""
        self._ended.set()
        self._thread.join()
        parts = {name: self._at_peak.get(name, 0) - was for name, was in self._parts.items()}
        found = {
            "resident": _status("VmHWM") - self._before,
            "divided": self._highest - self._first,
            **parts,
            **self._named,
        }
        return {name: value / 1024 for name, value in found.items()}

    def _look(self) -> None:
        while not self._ended.wait(0.005):
            now = _divided()
            self._highest = max(self._highest, now)
            if now > self._looked + 1024:
                self._looked, self._at_peak = now, _parts()
                self._named = {name: value / 1024 for name, value in self._known().items()}


def _status(name: str) -> int:
    """A line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _divided() -> int:
    """The proportional size, in KiB: a page of two processes counts half in each."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _parts() -> dict[str, float]:
    """KiB of the proportional size by what they are, and what malloc has given out of its own."""
    found = dict.fromkeys(("malloc's heap", "other pages", "shared memory", "files"), 0.0)
    kind = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if words[0] == "Pss:":
            found[kind] += int(words[1])
        elif not words[0].endswith(":"):
            kind = _kind(words[5] if len(words) > 5 else "")
    return {**found, "given out by malloc": _in_use() / 1024}


def _kind(path: str) -> str:
    if path == "[heap]":
        return "malloc's heap"
    if path.startswith("/dev/shm"):
        return "shared memory"
    return "files" if path.startswith("/") else "other pages"


class _Info(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _in_use() -> int:
    """Bytes that malloc has given out of its heap; 0 where it does not tell."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype = _Info
    return int(libc.mallinfo2().uordblks)
