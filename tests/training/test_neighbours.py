"""Forks that compute beside a process, and end with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spartito.training.trials.neighbours import Meeting, Neighbours


def lines(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def writes(path: Path) -> Callable[[int], Callable[[], object]]:
    """Work that makes a file longer with each turn."""

    def turn() -> None:
        with path.open("a") as file:
            file.write("x")

    return lambda number: turn


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
    def fails(number: int) -> Callable[[], object]:
        raise ValueError("no data here")

    with pytest.raises(RuntimeError, match="failed in its first step"), Neighbours(1, fails):
        pass
    assert "no data here" in capfd.readouterr().err


def test_who_meets_waits_for_all_others(tmp_path: Path) -> None:
    """Nobody is a turn ahead of this process, however often all are stopped between."""
    paths = [tmp_path / str(number) for number in range(3)]

    def work(number: int) -> Callable[[], object]:
        write, first = writes(paths[number])(number), iter([True])

        def turn() -> None:
            write()
            if not next(first, False):
                meeting.come(number)

        return turn

    with Meeting(3) as meeting, Neighbours(3, work) as neighbours:
        for turns in range(2, 40):
            neighbours.go_on()
            meeting.gather()
            assert all(turns <= lines(path) <= turns + 1 for path in paths)
            if turns % 7 == 0:
                neighbours.pause()


def test_who_does_not_come_is_not_waited_for_without_end() -> None:
    with Meeting(1, limit=0.01) as meeting, pytest.raises(TimeoutError, match="made no step"):
        meeting.gather()
