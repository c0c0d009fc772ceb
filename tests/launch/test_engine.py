from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spartito.launch.containers import IMAGE

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

LIMIT = 240.0
SPARTITO = (sys.executable, "-m", "spartito")
Start = Callable[..., "subprocess.Popen[str]"]


def docker(*words: str) -> str:
    return subprocess.run(
        ["docker", *words], capture_output=True, text=True, timeout=60, check=True
    ).stdout


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    if shutil.which("docker") is None:
        pytest.skip("there is no docker command here")
    asked = subprocess.run(["docker", "version"], capture_output=True, text=True, timeout=60)
    if asked.returncode:
        pytest.skip(f"no container engine answers: {asked.stderr.strip().splitlines()[-1]}")
    if not docker("image", "ls", "--quiet", IMAGE).strip():
        pytest.skip(f"there is no image {IMAGE!r}; build it: spartito cluster image")


class Job:
    """A job in containers of a folder of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.name = f"test-{secrets.token_hex(4)}"
        self.file = folder / "compose.yaml"
        self._started: list[subprocess.Popen[str]] = []
        made = subprocess.run(
            [*SPARTITO, "cluster", "compose", "mnist", "--name", self.name, *words],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=folder,
            check=True,
        )
        self.file.write_text(made.stdout)

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / self.name

    def start(self, *words: str) -> subprocess.Popen[str]:
        popen = subprocess.Popen(
            [*SPARTITO, "cluster", *words, str(self.file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(popen)
        return popen

    def does(self, *words: str) -> tuple[int, str]:
        """The exit code of a command, and what it printed."""
        popen = self.start(*words)
        out, _ = popen.communicate(timeout=LIMIT)
        return popen.returncode, out

    def container(self, service: str) -> str:
        mine = f"label=com.docker.compose.project={self.name}"
        return docker(
            "ps", "-aq", "--filter", mine, "--filter", f"label=com.docker.compose.service={service}"
        ).strip()

    def remains(self) -> list[str]:
        """What of the job the engine still has."""
        mine = f"label=com.docker.compose.project={self.name}"
        found = [
            docker(*words, "--filter", mine)
            for words in (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q"))
        ]
        return "".join(found).split()

    def history(self) -> list[dict[str, Any]]:
        return [json.loads(x) for x in (self.run_folder / "history.jsonl").read_text().splitlines()]

    def close(self) -> None:
        for popen in self._started:
            if popen.poll() is None:
                popen.kill()
            popen.communicate()
        self.does("down")
        for popen in self._started:
            popen.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Writes the compose file of a job; at the end nothing of it is left."""
    made: list[Job] = []

    def make(*words: str) -> Job:
        made.append(Job(tmp_path, *words))
        return made[-1]

    yield make
    for one in made:
        one.close()


def model(job: Job) -> Path:
    return next((job.run_folder / "checkpoints").glob("*/model.safetensors"))


def wait_for(popen: subprocess.Popen[str], sign: str) -> str:
    """What was printed until ``sign`` was; the test's own time limit ends the wait."""
    assert popen.stdout is not None
    seen = ""
    for line in popen.stdout:
        seen += line
        if sign in line:
            return seen
    raise AssertionError(f"it ended without {sign!r}:\n{seen}")


def test_two_workers_train_as_local_processes_do(job: Callable[..., Job], tmp_path: Path) -> None:
    two = job("--workers", "2", "--", "--epochs=1")
    code, text = two.does("up")
    assert code == 0, text
    assert "[worker 0] " in text
    assert model(two).stat().st_size > 0
    assert two.remains() == []
    local = tmp_path / "local"
    subprocess.run(
        [*SPARTITO, "train", "mnist", "--workers", "2", "--epochs", "1", "--out", str(local)],
        capture_output=True,
        timeout=LIMIT,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    expected = [json.loads(x) for x in (local / "history.jsonl").read_text().splitlines()]
    for here, there in zip(two.history(), expected, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-3)


def test_workers_that_share_ipc_use_shared_memory(job: Callable[..., Job]) -> None:
    two = job("--workers", "2", "--share-ipc", "--", "--epochs=1000")
    wait_for(two.start("up"), "epoch 1/")
    look = "cat /proc/[0-9]*/maps; true"
    for name in ("worker-0", "worker-1"):
        assert "/dev/shm/spartito-" in docker("exec", two.container(name), "sh", "-c", look)
    assert two.does("down")[0] == 0
    assert two.remains() == []


def test_servers_and_an_evaluator(job: Callable[..., Job]) -> None:
    served = job("--workers", "2", "--ps", "1", "--evaluator", "--", "--epochs=1")
    code, text = served.does("up")
    assert code == 0, text
    assert model(served).stat().st_size > 0
    assert (served.run_folder / "evaluations.jsonl").read_text().strip()
    assert served.remains() == []


def test_a_worker_that_is_killed_ends_a_synchronous_job(job: Callable[..., Job]) -> None:
    two = job("--workers", "2", "--", "--epochs=1000")
    popen = two.start("up")
    wait_for(popen, "[worker 0] ")
    docker("kill", two.container("worker-1"))
    out, _ = popen.communicate(timeout=LIMIT)
    assert popen.returncode == 69, out
    assert "worker 1 was killed by signal 9" in out
    assert two.remains() == []


def test_a_detached_job_is_there_until_it_is_taken_down(job: Callable[..., Job]) -> None:
    two = job("--workers", "2", "--", "--epochs=1000")
    code, text = two.does("up", "--detach")
    assert code == 0, text
    code, text = two.does("status")
    assert (code, text.count("running")) == (0, 2), text
    code, text = two.does("up")
    assert code == 2
    assert f"there is a job {two.name} already" in text
    assert two.does("down")[0] == 0
    assert two.remains() == []
    assert two.does("status")[0] == 2


def test_an_image_that_is_missing(job: Callable[..., Job]) -> None:
    code, text = job("--image", "spartito-nowhere").does("up")
    assert code == 2
    assert "there is no image 'spartito-nowhere'" in text
