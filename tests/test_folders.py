"""One job at a time writes into a folder, and who has it is named."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from spartito import folders
from spartito.errors import UnwritableError, UserError
from spartito.folders import LOCK, Holder, check_free, hold, job_of, release
from spartito.names import ENV_SECRET, ENV_SECRET_FILE, ENV_STORE
from tests.skips import on_linux

HOLDER = """
import os, sys
from spartito.folders import hold
hold(sys.argv[1], "backups", "me")
if sys.argv[2:] == ["fork"] and os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def another(folder: Path, *words: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a folder until it reads a line, or is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    release("me")


def test_another_process_is_refused_and_named(tmp_path: Path) -> None:
    with another(tmp_path) as process:
        with pytest.raises(UserError, match=f"in use by another job: process {process.pid} on "):
            hold(tmp_path, "checkpoints", "me")
        with pytest.raises(UserError, match=r"python\S* -c"):
            check_free(tmp_path)
    check_free(tmp_path)
    hold(tmp_path, "checkpoints", "me")


def test_who_ends_well_leaves_no_file(tmp_path: Path) -> None:
    with another(tmp_path) as process:
        assert (tmp_path / LOCK).exists()
        process.communicate("end\n")
        assert process.returncode == 0
        assert not [*tmp_path.iterdir()]


def test_a_killed_process_holds_nothing_though_its_forks_live(tmp_path: Path) -> None:
    with another(tmp_path, "fork") as process:
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        hold(tmp_path, "backups", "me")  # the fork has its standard input still
        found = Holder.of((tmp_path / LOCK).read_bytes())
        assert found is not None
        assert found.life[1] == os.getpid()


def test_one_process_holds_a_folder_for_several(tmp_path: Path) -> None:
    hold(tmp_path, "checkpoints", "me")
    hold(tmp_path, "checkpoints", "me")
    hold(tmp_path / "." / "", "backups", "other")
    with pytest.raises(UserError, match="two of this process write checkpoints into"):
        hold(tmp_path, "checkpoints", "other")
    release("me")
    assert (tmp_path / LOCK).exists()
    check_free(tmp_path)
    release("other")
    assert not (tmp_path / LOCK).exists()


def test_one_file_of_a_folder_is_held(tmp_path: Path) -> None:
    with another(tmp_path) as process, pytest.raises(UserError, match=f"process {process.pid}"):
        hold(tmp_path, "rows", "me")
    hold(tmp_path, "rows", "me", file="a.csv")
    check_free(tmp_path)
    with another(tmp_path) as process:  # the folder is no file of it
        hold(tmp_path, "rows", "other", file="b.csv")
        process.communicate("end\n")
    with pytest.raises(UserError, match=r"two of this process write rows into \S+/a\.csv"):
        hold(tmp_path, "rows", "other", file="a.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{LOCK}-a.csv", f"{LOCK}-b.csv"]
    release("other")
    release("me")
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_was_cleared_is_taken_anew(tmp_path: Path) -> None:
    hold(tmp_path, "checkpoints", "me")
    (tmp_path / LOCK).unlink()
    with another(tmp_path), pytest.raises(UserError, match="in use by another job"):
        hold(tmp_path, "checkpoints", "me")
    release("me")


def test_a_frozen_process_of_the_same_job_is_left_behind(tmp_path: Path) -> None:
    """Only where the job goes on without it: another start is refused."""
    job = {ENV_SECRET: "0123456789abcdef", ENV_STORE: "127.0.0.1:4711"}
    for name, value in job.items():
        os.environ[name] = value
    try:
        with another(tmp_path, **job) as process:
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(UserError, match="in use by another job"):
                hold(tmp_path, "backups", "me")
            hold(tmp_path, "backups", "me", inherits=True)
            process.send_signal(signal.SIGCONT)
            process.communicate("end\n")
        assert (tmp_path / LOCK).exists()  # which is ours
        other = {**job, ENV_STORE: "127.0.0.1:4712"}
        with another(tmp_path / "b", **other), pytest.raises(UserError, match="in use by another"):
            hold(tmp_path / "b", "backups", "me", inherits=True)
    finally:
        for name in job:
            del os.environ[name]


def elsewhere(tmp_path: Path) -> Path:
    """The record of a process on another machine."""
    raw = json.loads(Holder.own().encode())
    raw["life"][0], raw["host"] = "another-boot/pid:[1]", "node7"
    file = tmp_path / LOCK
    file.write_text(json.dumps(raw))
    return file


def test_a_record_of_another_machine_is_outlasted_or_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a file system locks against processes of one machine alone."""
    file, looks = elsewhere(tmp_path), list[float]()

    def renew(seconds: float) -> None:
        looks.append(seconds)
        os.utime(file)

    monkeypatch.setattr(time, "sleep", renew)
    with pytest.raises(UserError, match="on node7, since"):
        hold(tmp_path, "backups", "me")
    assert looks
    old = file.stat().st_mtime - folders.LIMIT_SECONDS - 1
    os.utime(file, (old, old))
    looks.clear()
    hold(tmp_path, "backups", "me")
    assert not looks


@on_linux
@pytest.mark.parametrize("over", [True, False])
def test_where_nothing_can_be_locked_the_record_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with another(tmp_path) as process:
        if over:
            process.kill()
            process.wait()
        monkeypatch.setattr(fcntl, "flock", none)

        def renew(_: float) -> None:
            with suppress(FileNotFoundError):  # other threads sleep too, also when it is gone
                os.utime(tmp_path / LOCK)

        monkeypatch.setattr(time, "sleep", renew)
        check_free(tmp_path)
        if over:
            hold(tmp_path, "backups", "me")
        else:
            with pytest.raises(UserError, match=f"process {process.pid} on"):
                hold(tmp_path, "backups", "me")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"life": 1}', b"\xff", b'{"life": ["a", 1, 2'])
def test_a_record_that_says_nothing_hinders_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK).write_bytes(content)
    assert Holder.of(content) is None
    hold(tmp_path, "backups", "me")


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnwritableError, match="cannot be written"):
        hold(tmp_path / "file" / "inside", "backups", "me")
    (tmp_path / LOCK).symlink_to(tmp_path / "file")
    with pytest.raises(UnwritableError, match="cannot be written"):
        hold(tmp_path, "backups", "me")
    check_free(tmp_path / "none")


def _ended(done: str) -> None:
    folders.at_end(Path(done).touch)


def _in_a_fork(folder: str) -> None:
    with pytest.raises(UserError, match="in use by another job"):
        hold(folder, "backups", "me")


@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_what_is_left_to_the_end_is_done_then_and_forks_hold_nothing(
    tmp_path: Path, kind: str
) -> None:
    hold(tmp_path / "held", "backups", "me")
    context: Any = multiprocessing.get_context(kind)
    done = str(tmp_path / "done")
    for work, argument in ((_ended, done), (_in_a_fork, str(tmp_path / "held"))):
        process = context.Process(target=work, args=(argument,))
        process.start()
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "held" / LOCK).exists()
    assert Path(done).exists()


def test_what_is_left_to_the_end_is_done_where_no_folder_is_held() -> None:
    program = "from spartito.folders import at_end; at_end(lambda: print('done'))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_a_job_is_its_store_and_its_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("what nobody knows\n")
    store, secret = {ENV_STORE: "a:1"}, {ENV_SECRET: "what nobody knows"}
    job = job_of(store | secret)
    assert len(job) == 16
    assert job_of(store | {ENV_SECRET_FILE: str(tmp_path / "secret")}) == job
    assert len({job, job_of({ENV_STORE: "b:1"} | secret), job_of(store | {ENV_SECRET: "x"})}) == 3
    for known in ({}, store, secret, store | {ENV_SECRET: " "}):
        assert job_of(known) == ""
