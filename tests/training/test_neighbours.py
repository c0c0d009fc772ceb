"""Forks that compute beside a process, and end with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spartito.training.neighbours import Neighbours


def lines(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def writes(path: Path) -> Callable[[], Callable[[], object]]:
    """Work that makes a file longer with each turn."""

    def turn() -> None:
        with path.open("a") as file:
            file.write("x")

    return lambda: turn


def grows(path: Path) -> None:
    """Return when the file is longer than now."""
    before, end = lines(path), time.monotonic() + 60
    while lines(path) <= before:
        assert time.monotonic() < end, "nobody computes"
        time.sleep(0.001)


def test_they_compute_when_they_are_told_to(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    with Neighbours(2, writes(path)) as neighbours:
        assert lines(path) >= 2  # each has made its first turn
        pids = list(neighbours._pids)
        neighbours.go_on()
        grows(path)
        neighbours.pause()
        assert all(state(pid) == "T" for pid in pids)
        neighbours.go_on()
        grows(path)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def state(pid: int) -> str:
    """What the kernel says of a process that was told to stop, once it has."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if found == "T":
            break
        time.sleep(0.001)
    return found


def test_work_that_fails_is_no_neighbour(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> Callable[[], object]:
        raise ValueError("no data here")

    with pytest.raises(RuntimeError, match="failed in its first step"), Neighbours(1, fails):
        pass
    assert "no data here" in capfd.readouterr().err
