"""A task that is gone, frozen or late is named; nobody hangs, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spartito import system
from spartito.cluster.limits import time_limit
from spartito.collectives.collective import MAX_PIGGYBACKED
from spartito.collectives.membership.rendezvous import connect
from spartito.collectives.membership.store import ask
from spartito.collectives.memory.rank_memory import LARGE
from spartito.collectives.memory.segment import Segment
from spartito.errors import TaskLostError, UserError
from tests.collectives import jobs
from tests.collectives.group import Group, running, spec
from tests.commands import free_port
from tests.skips import shares_memory, skip

LONG = 60.0  # a limit that no passing test comes near


def together(group: Group, world_size: int, limit: float, communication: str = "auto") -> None:
    """Start so many ranks, and return when all have met once."""
    port = free_port()
    for rank in range(world_size):
        group.start(rank, jobs.wait_for_others, world_size, port, limit, communication)
    for rank in range(world_size):
        assert group.result(rank) == "together"


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize("communication", ["auto", "process_group", "sockets"])
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (2, 1), (3, 2)])
def test_a_killed_rank_is_named_at_once(communication: str, world_size: int, victim: int) -> None:
    with running() as group:
        together(group, world_size, LONG, communication)
        others = [rank for rank in range(world_size) if rank != victim]
        for rank in others:
            group.tell(rank)  # they wait in the middle of a reduction
        group.signal(victim, signal.SIGKILL)
        for rank in others:
            kind, text, seconds = group.result(rank)
            assert kind == "TaskLostError"
            assert f"worker {victim} is gone" in text
            assert seconds < LONG / 2


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize("communication", ["auto", "sockets"])
def test_a_process_that_it_has_forked_does_not_hide_a_death(communication: str) -> None:
    """As the workers of a DataLoader do: it would be noticed at the time limit alone."""
    port, children = free_port(), []
    with running() as group:
        for rank in (0, 1):
            group.start(rank, jobs.wait_with_a_child, port, communication)
        try:
            for rank in (0, 1):
                children.append(group.result(rank))
                assert group.result(rank) == "together"
            group.tell(0)
            group.signal(1, signal.SIGKILL)
            kind, text, _ = group.result(0)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
    assert kind == "TaskLostError"
    assert "worker 1 is gone" in text


def test_nor_does_it_hide_a_death_from_a_parameter_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, running() as group:
        server.settimeout(LONG)
        group.start(0, jobs.wire_with_a_child, server.getsockname()[1])
        with server.accept()[0] as connection:
            connection.settimeout(LONG)
            child = group.result(0)
            try:
                group.signal(0, signal.SIGKILL)
                assert connection.recv(1) == b""
            finally:
                os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize("communication", ["auto", "process_group", "sockets"])
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_frozen_rank_is_named_at_the_limit(communication: str, victim: int) -> None:
    with running() as group:
        together(group, 2, 1.0, communication)
        group.signal(victim, signal.SIGSTOP)
        group.tell(1 - victim)
        kind, text, seconds = group.result(1 - victim)
        assert kind == "TaskLostError"
        assert f"worker {victim}" in text
        assert "did not come within 1 s" in text
        assert seconds >= 1.0
        if communication == "auto" and system.shares_memory():
            assert "its process lives" in text
        group.signal(victim, signal.SIGCONT)


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize("communication", ["auto", "process_group", "sockets"])
def test_everyone_comes_after_a_pause(communication: str) -> None:
    with running() as group:
        together(group, 2, LONG, communication)
        group.signal(1, signal.SIGSTOP)
        group.tell(0)
        group.tell(1)
        group.signal(1, signal.SIGCONT)
        assert [group.result(rank) for rank in range(2)] == ["met", "met"]


def test_who_never_comes_is_named_by_all() -> None:
    port = free_port()
    with running() as group:
        for rank in (0, 1):
            group.start(rank, jobs.only_join, 4, port, 4.0)
        for rank in (0, 1):
            kind, text = group.result(rank)
            assert kind == "TaskLostError"
            assert f"worker 2 and worker 3 did not come to 127.0.0.1:{port} within 4 s" in text


def test_a_task_with_another_secret_is_refused_at_the_store() -> None:
    """The one that keeps it goes on waiting: an unknown peer cannot end a job."""
    port = free_port()
    with running() as group:
        for rank in (0, 1):
            group.start(rank, jobs.join_with_a_secret, port, 5.0)
        kind, text = group.result(1)
        assert kind == "SecretError"
        assert f"worker 0 at 127.0.0.1:{port} does not know the secret of this task" in text
        kind, text = group.result(0)
        assert kind == "TaskLostError"
        assert f"worker 1 did not come to 127.0.0.1:{port} within 5 s" in text


def test_a_second_process_of_one_rank_is_refused() -> None:
    port = free_port()
    with running() as group:
        for rank in (0, 1):
            group.start(rank, jobs.wait_for_others, 2, port, LONG, "sockets")
        for rank in (0, 1):
            assert group.result(rank) == "together"
        group.start(2, jobs.come_as_rank_1, 2, port, 1.0)
        kind, text = group.result(2)
        assert kind == "TaskLostError"
        assert f"another process has come to 127.0.0.1:{port} as worker 1" in text
        for rank in (0, 1):
            group.tell(rank)
        assert [group.result(rank) for rank in range(2)] == ["met", "met"]


def test_a_chief_that_never_comes_is_named() -> None:
    port = free_port()
    with running() as group:
        group.start(1, jobs.only_join, 2, port, 1.0)
        kind, text = group.result(1)
        assert kind == "TaskLostError"
        assert text.startswith(f"worker 0 did not come to 127.0.0.1:{port} within 1 s")


def test_a_port_in_use_is_a_user_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"worker 0 cannot listen on 127.0.0.1:{port}"):
            connect(spec(0, 2, port), torch.device("cpu"), 5)


@shares_memory
def test_who_gets_on_is_waited_for() -> None:
    port = free_port()
    with running() as group:
        for rank in range(2):
            group.start(rank, jobs.slow_leader, 2, port, 3.0)
        assert [group.result(rank) for rank in range(2)] == [True, True]


def test_arguments_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unknown communication 'process_grop'"):
        connect(spec(0, 2, free_port()), torch.device("cpu"), 5, "process_grop")
    for text in ("soon", "-1", "inf", "nan", "0", "1e8"):
        monkeypatch.setenv("SPARTITO_TIMEOUT", text)
        with pytest.raises(UserError, match=f"SPARTITO_TIMEOUT='{text}' is not a number"):
            time_limit()
    monkeypatch.setenv("SPARTITO_TIMEOUT", "7.5")
    assert time_limit() == 7.5


def test_asking_the_store_ends() -> None:
    assert ask(lambda: 3, 5, "worker 0") == 3
    with pytest.raises(UserError, match="mine"):
        ask(lambda: _raise(UserError("mine")), 5, "worker 0")
    with pytest.raises(TaskLostError, match="worker 0 is gone: it keeps the store"):
        ask(lambda: _raise(RuntimeError("broken pipe")), 5, "worker 0")


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.usefixtures("no_segments_left")
def test_an_exception_leaves_nothing_in_memory() -> None:
    port = free_port()
    with running() as group:
        for rank in range(2):
            group.start(rank, jobs.raise_after_joining, 2, port)
        assert group.result(1) == ("ValueError", "my own")
        kind, text = group.result(0)
        assert kind == "TaskLostError"
        assert "worker 1 is gone" in text


@shares_memory
@pytest.mark.usefixtures("no_segments_left")
def test_a_kill_while_memory_is_shared_out_leaves_nothing() -> None:
    port = free_port()
    with running() as group:
        for rank in range(2):
            group.start(rank, jobs.make_reducer, 2, port)
            assert rank == 0 or [group.result(r) for r in (0, 1)] == ["together"] * 2
        group.signal(1, signal.SIGKILL)
        group.tell(0)
        kind, text = group.result(0)
        assert kind == "TaskLostError"
        assert "worker 1 is gone" in text


def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of so many bytes."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        skip("mount", f"no right to mount a file system: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system with no space for the first segment."""
    yield from small_disk(tmp_path / "full", "64k")


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[Path]:
    """A file system with space for the first segment, and not much more."""
    yield from small_disk(tmp_path / "tight", "5m")


def test_a_full_directory_is_passed_over(full: Path, tmp_path: Path) -> None:
    port = free_port()
    with running() as group:
        for rank in range(2):
            group.start(rank, jobs.join_in, 2, port, [str(full), str(tmp_path)], 1 << 20)
        for rank in range(2):
            assert group.result(rank) == (str(tmp_path), [0.0, 1.0])
    assert sorted(tmp_path.iterdir()) == [full]
    assert list(full.iterdir()) == []


def test_no_space_anywhere_ends_all(full: Path) -> None:
    port = free_port()
    with running() as group:
        for rank in range(2):
            group.start(rank, jobs.join_in, 2, port, [str(full)], 0)
        kind, text = group.result(0)
        assert kind == "UserError"
        assert f"no space for 0.5 MB of shared memory in {full}" in text
        assert "--shm-size" in text
        # Rank 0 may be gone before rank 1 has asked for its reason.
        kind, text = group.result(1)
        assert kind in ("UserError", "TaskLostError")
        assert "worker 0" in text
    assert list(full.iterdir()) == []


def test_no_space_for_the_gradients_ends_all(tight: Path) -> None:
    port = free_port()
    with running() as group:
        for rank in range(2):
            group.start(rank, jobs.join_in, 2, port, [str(tight)], 3 * 10**6)
        for rank in range(2):
            kind, text = group.result(rank)
            assert kind == "UserError"
            assert f"no space for 9.0 MB of shared memory in {tight}" in text
    assert list(tight.iterdir()) == []


def test_shared_memory_that_is_another_users_is_not_mapped(tmp_path: Path) -> None:
    theirs, link = tmp_path / "theirs", tmp_path / "link"
    theirs.write_bytes(bytes(4096))
    link.symlink_to(theirs)
    os.mkfifo(tmp_path / "pipe")
    refused = [link, tmp_path / "pipe", tmp_path]
    if os.geteuid() == 0:
        os.chown(theirs, 12345, -1)
        refused.append(theirs)
    for path in refused:
        with pytest.raises(UserError, match=f"{path} is no file of this user's"):
            Segment.attach(path, 4096)


def test_a_segment_in_a_directory_that_is_not_ours(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.access(closed, os.W_OK):  # root writes anywhere but on what is mounted read-only
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(closed)], capture_output=True
        )
        if mounted.returncode:
            skip("mount", "root may write everywhere")
    try:
        segment = Segment.create(4096, [closed, tmp_path])
        assert segment.path.parent == tmp_path
        other = Segment.attach(segment.path, 4096)
        segment.path.unlink()
        segment.tensor(64, 3, torch.float32).fill_(2.5)
        assert other.tensor(64, 3, torch.float32).tolist() == [2.5] * 3
        assert other.tensor(0, 0, torch.int64).shape == (0,)
        with pytest.raises(UserError, match=f"no space for 0.0 MB of shared memory in {closed}"):
            Segment.create(4096, [closed])
    finally:
        subprocess.run(["umount", str(closed)], capture_output=True)


def test_what_a_killed_job_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left, lock, new = (
        tmp_path / name
        for name in (f"spartito-{n:016x}{end}" for n, end in ((1, ""), (1, ".0"), (2, "")))
    )
    others = tmp_path / "other"
    for path in (left, lock, new, others):
        path.touch()
    mapped = Segment.create(4096, [tmp_path])  # its creator lives
    for path in (left, lock, others, mapped.path):
        os.utime(path, (0, 0))
    Segment.create(4096, [tmp_path])
    assert not left.exists()
    assert not lock.exists()
    assert new.exists()  # a moment ago: its creator may be about to lock it
    assert others.exists()
    assert mapped.path.exists()


def test_a_line_holds_what_a_step_brings() -> None:
    assert MAX_PIGGYBACKED >= 4
    assert LARGE % 64 == 0
