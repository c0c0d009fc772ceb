"""Snapshots survive a crash, and what became of them is said as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest

from spartito.errors import TaskLostError, UserError
from spartito.ps.client.link import Restarted
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.messages import Load, Status
from spartito.ps.protocol.rules import Rules
from spartito.ps.server.counter import Counter
from spartito.ps.server.server import pauses
from spartito.storage.private import private_directory
from tests import commands
from tests.ps.served import LIMIT, Job
from tests.skips import skip

LOADED = {"loaded": True}


def loaded(folder: Path, ends: ExitStack) -> Job:
    """A server that has values of a job, and has written them down."""
    job = Job(folder, 1, Rules(1))
    ends.callback(job.close)
    chief = job.link(hello=job.hello(chief=True))
    chief.load(Load("job", [{}], 0), allocate(job.spans[0]), {})
    return job


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def of_zeros(file: Path) -> None:
    """As a crash leaves it where names reach the disk before contents."""
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (halved, "its snapshot is damaged"),
        (emptied, "its snapshot is damaged"),
        (of_zeros, "its snapshot is damaged"),
        (Path.unlink, "has no snapshot of job job: no "),
    ],
)
def test_a_server_that_lost_its_snapshot_says_so(
    harm: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    with ExitStack() as ends:
        job = loaded(tmp_path, ends)
        job.kill(0)
        harm(tmp_path / "ps-0")
        job.start(0)
        for hello in (job.hello(**LOADED), job.hello(chief=True, **LOADED)):
            with pytest.raises(TaskLostError, match=rf"ps 0 was started again, and {why}"):
                job.link(hello=hello)
        with pytest.raises(TaskLostError, match=why):  # the server ends once the chief knows
            job.serving[0].result(LIMIT)


def test_a_chief_hears_it_from_the_link_that_it_has(tmp_path: Path) -> None:
    with ExitStack() as ends:
        job = Job(tmp_path, 1, Rules(1))
        ends.callback(job.close)
        chief = job.link(hello=job.hello(chief=True))
        job.kill(0)
        job.start(0)
        with pytest.raises(Restarted):  # it had nothing yet that could be lost
            chief.ask(Status())
        chief.load(Load("job", [{}], 0), allocate(job.spans[0]), {})
        job.kill(0)
        (tmp_path / "ps-0").unlink()
        job.start(0)
        with pytest.raises(TaskLostError, match="has no snapshot of job job"):
            chief.ask(Status())


def test_a_snapshot_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, bool]] = []
    fsync = os.fsync

    def noted(file: int) -> None:
        fsync(file)
        there = tmp_path / "ps-0"
        named = there.exists() and there.stat().st_ino == os.fstat(file).st_ino
        synced.append((os.fstat(file).st_ino, named))

    monkeypatch.setattr(os, "fsync", noted)
    with ExitStack() as ends:
        loaded(tmp_path, ends)
        file = (tmp_path / "ps-0").stat().st_ino
        assert synced[:2] == [(file, False), (tmp_path.stat().st_ino, False)]
        assert {path.name for path in tmp_path.iterdir()} == {"ps-0", "ps-0.updates"}


def test_a_snapshot_that_cannot_be_written_ends_chief_and_server(tmp_path: Path) -> None:
    with ExitStack() as ends:
        job = Job(tmp_path / "there", 1, Rules(1))
        ends.callback(job.close)
        shutil.rmtree(tmp_path / "there")
        (tmp_path / "there").touch()
        chief = job.link(hello=job.hello(chief=True))
        with pytest.raises(UserError, match=r"ps 0 cannot write its snapshot .*there.*\n  Free"):
            chief.load(Load("job", [{}], 0), allocate(job.spans[0]), {})
        with pytest.raises(UserError, match="ps 0 cannot write its snapshot"):
            job.serving[0].result(LIMIT)


FULL = """
import sys
from pathlib import Path
from spartito.errors import UserError
from spartito.ps.server.counter import Counter
from spartito.ps.server.server import pauses

folder = Path(sys.argv[1])
try:
    with open(folder / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
except OSError:
    pass
try:
    Counter(folder / "updates").value = 1
except UserError as error:
    print(error)
"""


def test_a_full_disk_is_an_error_and_no_signal(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=64k tmpfs $1 && exec $2 -c "$3" $1'
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if not shutil.which("unshare") or subprocess.run([*words[:4], "true"], check=False).returncode:
        skip("mount", "this machine allows no mounts of our own")
    done = subprocess.run(
        [*words, str(tmp_path), sys.executable, FULL],
        capture_output=True, text=True, timeout=commands.LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (
        "updates cannot be written: No space left on device\n  Free some space there" in done.stdout
    )


def test_a_counter_follows_no_link(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "updates").symlink_to(mine)
    with pytest.raises(UserError, match="updates cannot be written"):
        Counter(tmp_path / "updates")
    assert mine.read_text() == "precious"


def test_a_private_folder_is_ours_alone(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    for _ in range(2):
        assert private_directory(folder, "advice") == folder
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)  # as it was made before
    private_directory(folder, "advice")
    assert folder.stat().st_mode & 0o777 == 0o700


def linked(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")


def opened(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def given_away(folder: Path) -> None:
    if os.geteuid() != 0:
        skip("root", "only root gives folders away")
    folder.mkdir()
    os.chown(folder, 65534, -1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (linked, "cannot be used: it is a link"),
        (Path.touch, "cannot be used: File exists"),
        (opened, "is open to others: its mode is 0777"),
        (given_away, r"belongs to another user \(uid 65534\)"),
    ],
)
def test_a_folder_of_others_is_none(make: Callable[[Path], None], why: str, tmp_path: Path) -> None:
    folder = tmp_path / "private"
    make(folder)
    with pytest.raises(UserError, match=rf"private {why}\n  Name another"):
        private_directory(folder, "Name another.")
    assert list((tmp_path).rglob("*/*")) == []


def test_the_first_snapshots_come_early() -> None:
    assert list(islice(pauses(10.0), 6)) == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
