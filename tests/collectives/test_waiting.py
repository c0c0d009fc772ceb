from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from spartito.waiting import HalfTime
from tests.collectives import jobs
from tests.collectives.group import running
from tests.commands import eventually, free_port
from tests.skips import shares_memory


@pytest.mark.parametrize(
    ("way", "late"),
    [
        ("auto", 0),
        ("auto", 2),
        ("sockets", 1),
        pytest.param("on aab", 1, marks=shares_memory),
        ("on aab", 2),
    ],
)
def test_who_waits_says_for_whom(way: str, late: int) -> None:
    port = free_port()
    with running() as group:
        for rank in range(3):
            group.start(rank, jobs.tell_notes, 3, port, way)
        for rank in range(3):
            assert group.result(rank) == "together"
        group.signal(late, signal.SIGSTOP)
        others = [rank for rank in range(3) if rank != late]
        for rank in others:
            group.tell(rank)
        said = rf"waiting for worker %s, for \d+ s now; the limit is {jobs.LONG:g} s"
        assert re.fullmatch(said % late, group.result(others[0]))
        if way == "on aab" and late == 1:
            # Rank 2 is the leader of another machine: it waits for rank 0, the late one's leader.
            assert re.fullmatch(said % 0, group.result(2))
        group.signal(late, signal.SIGCONT)
        group.tell(late)
        assert [group.result(rank) for rank in range(3)] == [None] * 3


def test_the_first_meeting_says_for_whom_it_waits() -> None:
    port = free_port()
    with running() as group:
        group.start(1, jobs.tell_notes, 3, port, "auto")
        said = rf"waiting for worker 0 at 127\.0\.0\.1:{port}, for \d+ s now"
        assert re.match(said, group.result(1))
        group.start(0, jobs.tell_notes, 3, port, "auto")
        assert re.match(r"waiting for worker 2, for \d+ s now", group.result(0))
        group.start(2, jobs.tell_notes, 3, port, "auto")
        for rank in range(3):
            assert group.result(rank) == "together"
            group.tell(rank)
        assert [group.result(rank) for rank in range(3)] == [None] * 3


def test_stacks_are_written_at_half_of_the_limit_of_a_wait_that_torch_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARTITO_STACKS", str(tmp_path))
    half = HalfTime(0.2)
    half.since = time.perf_counter()
    assert eventually(lambda: any("Thread" in file.read_text() for file in tmp_path.iterdir()))
    (file,) = tmp_path.iterdir()
    assert "half of the limit of 0.2 s is over" in file.read_text()
    half.close()
