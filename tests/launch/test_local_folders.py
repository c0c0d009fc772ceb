"""Folders, logs and throttles of the tasks of one machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spartito.cluster import resolve
from spartito.errors import UserError
from spartito.launch.processes.local import Local
from tests.launch.jobs import start
from tests.launch.supervised import vanished, wait_until
from tests.launch.test_local import LIMIT, run


def test_each_task_of_a_role_learns_who_it_is(tmp_path: Path) -> None:
    options = ["--workers", "2", "--ps", "2", "--evaluator", "--chief", "--nnodes", "1"]
    rows, _ = run(tmp_path, *options, RANK="3")
    told = {name: env for name, _, env in rows}
    assert sorted(told) == ["chief 0", "evaluator 0", "ps 0", "ps 1", "worker 0", "worker 1"]
    for name, env in told.items():
        spec = resolve(env)
        assert str(spec.task) == name
        assert spec.world_size == 3
        assert "RANK" not in env
    assert not any("SPARTITO_SECRET" in env for env in told.values())
    files = {Path(env["SPARTITO_SECRET_FILE"]) for env in told.values()}
    assert len(files) == len(told)
    assert not any(file.exists() for file in files)
    (folder,) = {env["SPARTITO_SNAPSHOT_DIR"] for env in told.values()}
    assert Path(folder).is_absolute()
    assert not Path(folder).exists()


def test_a_folder_for_snapshots_that_the_user_named_stays(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    rows, _ = run(tmp_path, "--workers", "1", "--ps", "1", SPARTITO_SNAPSHOT_DIR=str(mine))
    assert {env["SPARTITO_SNAPSHOT_DIR"] for _, _, env in rows} == {str(mine)}
    assert mine.exists()


def test_an_evaluator_beside_workers_needs_no_folder(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, "--workers", "1", "--evaluator", "--strategy", "one_device")
    assert sorted(name for name, _, _ in rows) == ["evaluator 0", "worker 0"]
    assert not any("SPARTITO_SNAPSHOT_DIR" in env for _, _, env in rows)


@pytest.mark.parametrize("fails", [False, True])
def test_a_killed_server_finds_the_folder_again(tmp_path: Path, fails: bool) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import json, os, pathlib, signal, sys, time\n"
        "folder = pathlib.Path(os.environ['SPARTITO_SNAPSHOT_DIR'])\n"
        f"pathlib.Path({str(tmp_path / 'folder')!r}).write_text(str(folder))\n"
        "snapshot = folder / 'snapshot'\n"
        "if json.loads(os.environ['TF_CONFIG'])['task']['type'] != 'ps':\n"
        "    while not (folder / 'back').exists(): time.sleep(0.005)\n"
        "    sys.exit(int(sys.argv[1]))\n"
        "if snapshot.exists():\n"
        "    (folder / 'back').touch()\n"
        "else:\n"
        "    snapshot.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    options = ["--workers", "1", "--ps", "1"]
    got = subprocess.run(
        [sys.executable, "-m", "spartito", "run", *options, str(script), str(3 * fails)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert got.returncode == 3 * fails
    assert "spartito: ps 0 was killed by SIGKILL; it is started again (1 of 3)\n" in got.stderr
    assert not Path((tmp_path / "folder").read_text()).exists()


def test_the_folder_goes_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, time\nprint(os.environ['SPARTITO_SNAPSHOT_DIR'], os.getpid(), flush=True)\n"
        "time.sleep(300)"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "spartito", "run", "--workers", "1", "--ps", "1", str(script)],
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        lines = [job.stdout.readline().split() for _ in range(2)]
        (folder,) = {Path(line[-2]) for line in lines}
        assert folder.is_dir()
        job.kill()
    wait_until(lambda: not folder.exists())
    assert vanished([int(line[-1]) for line in lines])


@pytest.mark.parametrize("workers", [1, 2])
def test_what_each_task_prints_is_in_a_file_of_its_own(tmp_path: Path, workers: int) -> None:
    script = tmp_path / "prints.py"
    script.write_text(
        "import os, sys, time, pathlib\n"
        "rank, other = os.environ['RANK'], pathlib.Path(sys.argv[1], 'worker-1.log')\n"
        "print('rank', rank)\n"
        "print('to stderr', file=sys.stderr)\n"
        "while os.environ['WORLD_SIZE'] == '2' and rank == '0':\n"
        "    if other.exists() and 'rank 1' in other.read_text(): break\n"
        "    time.sleep(0.005)\n"
        "if rank == '0': raise ValueError('the cause')\n"
        "time.sleep(300)\n"
    )
    logs = tmp_path / "some" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-0.log").write_text("of an earlier job\n")
    command = [sys.executable, "-m", "spartito", "run", f"--workers={workers}", f"--log-dir={logs}"]
    got = subprocess.run(
        [*command, str(script), str(logs)], capture_output=True, text=True, timeout=LIMIT
    )
    assert got.returncode == 1
    assert got.stderr.count("ValueError: the cause") == 1
    assert sorted(path.name for path in logs.iterdir()) == [
        "worker-0.log",
        "worker-0.log.1",
        *(f"worker-{rank}.log" for rank in range(1, workers)),
    ]
    assert (logs / "worker-0.log.1").read_text() == "of an earlier job\n"
    first = (logs / "worker-0.log").read_text()
    assert {"rank 0", "to stderr"} == set(first.splitlines()[:2])
    assert "Traceback" in first
    assert first.endswith("ValueError: the cause\n")
    assert ("[worker 0] rank 0\n" if workers > 1 else "rank 0\n") in got.stdout


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    script = tmp_path / "prints.py"
    script.write_text("print('x' * 100)")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--log-dir: .*file"):
        start(Local, [str(script)], workers=1, environment={}, log_dir=tmp_path / "file" / "logs")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").symlink_to("/dev/full")
    command = [sys.executable, "-m", "spartito", "run", "--workers=1"]
    got = subprocess.run(
        [*command, f"--log-dir={tmp_path / 'logs'}", str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (got.returncode, got.stdout) == (0, "x" * 100 + "\n")
    assert got.stderr.count("cannot be written any more: No space left on device") == 1


def test_a_slow_task_has_a_throttle(tmp_path: Path) -> None:
    script = tmp_path / "find.py"
    script.write_text(
        "import os, time, pathlib\n"
        "module = b'spartito.launch.processes.throttle'\n"
        "def throttled():\n"
        "    for file in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        "        try: words = file.read_bytes().split(b'\\0')\n"
        "        except OSError: continue\n"
        "        if words[2:5] == [module, b'%d' % os.getpid(), b'0.5']:\n"
        "            return True\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not throttled(): time.sleep(0.005)\n"
    )
    options = ["--workers", "2", "--slow", "worker:1=0.5"]
    got = subprocess.run(
        [sys.executable, "-m", "spartito", "run", *options, str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (got.returncode, got.stdout) == (0, ""), got.stderr
