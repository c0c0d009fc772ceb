"""At every failpoint a process is killed, or its disk is full, and what is left is as promised."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spartito.checkpoint import CheckpointManager, read_checkpoint
from spartito.errors import UserError
from spartito.failpoints import ENV, FAILPOINTS, failpoint
from spartito.ps.protocol.rules import Rules
from spartito.ps.server.snapshot import Snapshot
from spartito.storage import sweep, verify, write_directory, write_file_atomically
from tests.processes import context
from tests.ps.bench import Bench, push
from tests.ps.coordination import eventually
from tests.ps.simulation.world import simulate

LIMIT = 60.0
JOB = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def directory(folder: Path, content: str = "new") -> None:
    with write_directory(folder / "one") as new:
        (new / "a.txt").write_text(content)


def file(folder: Path, content: str = "new") -> None:
    write_file_atomically(folder / "x", content)


def checkpoint(folder: Path, name: str = "b") -> None:
    CheckpointManager(folder / "run", keep=1).save({"model": {"w": torch.ones(2)}}, name)


def snapshot(folder: Path, updates: int = 2) -> None:
    bench = Bench(Rules(1))
    with bench.store.lock:
        bench.store.begin("job")
    for step in range(updates):
        bench.push(0, push(step), 1.0)
    Snapshot(folder / "ps-0", "ps 0").write(bench.store)


def restored(folder: Path) -> int:
    """How many updates a server has that goes on from what lies there."""
    bench = Bench(Rules(1))
    bench.store.ready = False
    assert Snapshot(folder / "ps-0", "ps 0").restore(bench.store, "job")
    return bench.store.version


def job(folder: Path) -> None:
    assert simulate(3) is None  # in which a server is started again


def launcher(folder: Path) -> None:
    (folder / "sleeps.py").write_text(JOB)
    command = [sys.executable, "-m", "spartito", "run", "--workers", "2", str(folder / "sleeps.py")]
    os.execv(sys.executable, command)


def began(folder: Path) -> None:
    """What lies there before."""
    directory(folder, "old")
    file(folder, "old")
    checkpoint(folder, "a")
    snapshot(folder, 1)


def of_directory(folder: Path) -> None:
    sweep(folder)
    assert (folder / "one" / "a.txt").read_text() == "old"
    verify(folder / "one")
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def of_file(folder: Path) -> None:
    assert (folder / "x").read_text() == "old"


def of_checkpoint(folder: Path) -> None:
    manager = CheckpointManager(folder / "run", keep=1)
    assert [path.name for path in manager.all()] == ["a", "b"]
    assert read_checkpoint(folder / "run" / "b")["model"]["w"].tolist() == [1.0, 1.0]


def of_older_checkpoint(folder: Path) -> None:
    manager = CheckpointManager(folder / "run", keep=1)
    manager.prepare()
    assert manager.latest() == folder / "run" / "a"
    assert [path.name for path in (folder / "run").iterdir()] == ["a"]


def of_snapshot(folder: Path) -> None:
    assert restored(folder) == 1


def of_new_snapshot(folder: Path) -> None:
    assert restored(folder) == 2


def of_launcher(folder: Path) -> None:
    """Nothing that the launcher started goes on without it."""

    def running() -> bool:
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        return str(folder / "sleeps.py") in listed.stdout

    eventually(lambda: not running())


def nothing(folder: Path) -> None:
    """What is left is of a simulation."""


Scenario = Callable[[Path], None]
SCENARIOS: dict[str, tuple[Scenario, Scenario]] = {
    "storage.directory.before_manifest": (directory, of_directory),
    "storage.directory.before_rename": (directory, of_directory),
    "storage.directory.between_renames": (directory, of_directory),
    "storage.file.before_rename": (file, of_file),
    "storage.stream.begun": (checkpoint, of_older_checkpoint),
    "checkpoint.before_remove": (checkpoint, of_checkpoint),
    "ps.snapshot.before_replace": (snapshot, of_snapshot),
    "ps.snapshot.after_replace": (snapshot, of_new_snapshot),
    "ps.server.loaded": (job, nothing),
    "ps.chief.before_reopen": (job, nothing),
    "ps.worker.before_report": (job, nothing),
    "launch.supervisor.started": (launcher, of_launcher),
}
"""Of each failpoint what comes to it, and what must hold afterwards."""


def run(name: str, scenario: Scenario, folder: Path) -> None:
    os.environ[ENV] = f"{name}:kill"
    torch.set_num_threads(1)
    scenario(folder)


def test_the_table_names_every_failpoint_and_no_other() -> None:
    source = Path(str(sys.modules[failpoint.__module__].__file__)).parent
    text = "".join(path.read_text() for path in source.rglob("*.py"))
    assert sorted(re.findall(r'failpoint\("([\w.]+)"\)', text)) == sorted(FAILPOINTS)
    assert set(SCENARIOS) == set(FAILPOINTS)
    page = Path(__file__).parents[1] / "docs" / "explanation" / "inside" / "failpoints.md"
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", page.read_text(), re.MULTILINE)
    assert dict(rows).items() >= FAILPOINTS.items()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_process_that_is_killed_there_leaves_what_was_promised(name: str, tmp_path: Path) -> None:
    scenario, afterwards = SCENARIOS[name]
    began(tmp_path)
    process = context.Process(target=run, args=(name, scenario, tmp_path), daemon=True)
    process.start()
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL, "the failpoint was not reached"
    afterwards(tmp_path)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "before_r" in name][:3])
def test_a_full_disk_there_leaves_what_was(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, afterwards = SCENARIOS[name]
    began(tmp_path)
    monkeypatch.setenv(ENV, f"{name}:error")
    with pytest.raises((UserError, OSError), match="No space left"):
        scenario(tmp_path)
    afterwards(tmp_path)


def test_the_third_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spartito.failpoints._hits", Counter())
    monkeypatch.setenv(ENV, "checkpoint.before_remove:error:3")
    failpoint("checkpoint.before_remove")
    failpoint("ps.server.loaded")
    failpoint("checkpoint.before_remove")
    with pytest.raises(OSError, match="failpoint checkpoint"):
        failpoint("checkpoint.before_remove")


@pytest.mark.parametrize(
    "wanted", ["ps.nowhere:kill", "ps.server.loaded:pause", "ps", "ps.server.loaded:kill:x"]
)
def test_a_failpoint_that_is_none_is_an_error(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, wanted)
    with pytest.raises(UserError, match="is not NAME:kill, NAME:error"):
        failpoint("checkpoint.before_remove")
