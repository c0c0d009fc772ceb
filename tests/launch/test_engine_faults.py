"""What the table of faults in docs/clusters.md promises, in real containers."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.launch.containers import LIMIT, SPARTITO, Job, docker

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

Make = Callable[..., Job]
FAULT_SECONDS = 10
EPOCHS = 8
ENDLESS = ("--", "--epochs=1000")
SERVED = ("--workers", "2", "--ps", "1")
SOON = ("--strategy-options", '{"lease_seconds": 3}')
"""A silent worker is given up before the fault has passed."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The history of two local processes."""
    out = tmp_path_factory.mktemp("undisturbed")
    words = ["train", "mnist", "--workers", "2", f"--epochs={EPOCHS}", f"--out={out}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*SPARTITO, *words], capture_output=True, timeout=LIMIT, check=True, env=environment
    )
    return [json.loads(x) for x in (out / "history.jsonl").read_text().splitlines()]


def same(history: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(history) == len(other) == EPOCHS
    for here, there in zip(history[:3], other, strict=False):  # sums of floats drift apart later
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-3)


def applied(job: Job) -> int:
    """The examples whose gradients the server has applied."""
    found = [json.loads(one.read_text()) for one in (job.run_folder / "tasks").glob("ps-*.json")]
    return sum(one["examples"] for one in found)


def test_synchronous_killed(container_job: Make) -> None:
    job = container_job("--workers", "2", *ENDLESS)
    following = job.start("up")
    following.until("epoch 1/")
    docker("kill", job.container("worker-1"))
    code, text = following.end()
    assert code == 69, text
    assert "worker 1 was killed by signal 9" in text
    assert job.remains == []


def test_synchronous_paused(container_job: Make, undisturbed: list[dict[str, Any]]) -> None:
    job = container_job("--workers", "2", "--", f"--epochs={EPOCHS}")
    following = job.start("up")
    following.until("epoch 1/")
    docker("pause", job.container("worker-1"))
    time.sleep(FAULT_SECONDS)  # the fault itself
    docker("unpause", job.container("worker-1"))
    code, text = following.end()
    assert code == 0, text
    same(job.history, undisturbed)


def test_synchronous_cut_and_rejoined(
    container_job: Make, undisturbed: list[dict[str, Any]]
) -> None:
    job = container_job("--workers", "2", "--", f"--epochs={EPOCHS}")
    following = job.start("up")
    following.until("epoch 1/")
    job.cut("worker-1")
    time.sleep(FAULT_SECONDS)
    job.rejoin("worker-1")
    code, text = following.end()
    assert code == 0, text
    same(job.history, undisturbed)


@pytest.mark.parametrize("fault", ["pause", "cut"])
def test_synchronous_beyond_the_time_limit(container_job: Make, fault: str) -> None:
    job = container_job("--workers", "2", "--timeout", "5", *ENDLESS)
    following = job.start("up")
    following.until("epoch 1/")
    job.cut("worker-1") if fault == "cut" else docker("pause", job.container("worker-1"))
    code, text = following.end()
    assert code == 69, text
    assert "[worker 0] spartito: error: worker 1" in text
    assert "within 5 s" in text
    assert job.remains == []


def test_asynchronous_crashed(container_job: Make) -> None:
    job = container_job(*SERVED, "--", "--epochs=12")
    following = job.start("up")
    following.until("epoch 1/")
    job.crash("worker-1")
    following.until("worker 1 ended and is started again")
    code, text = following.end()
    assert code == 0, text
    assert applied(job) == 12 * 8000


def test_asynchronous_killed_for_good(container_job: Make) -> None:
    job = container_job(*SERVED, "--", "--epochs=10")
    following = job.start("up")
    following.until("epoch 1/")
    docker("kill", job.container("worker-1"))
    code, text = following.end()
    assert code == 0, text
    assert applied(job) == 10 * 8000


@pytest.mark.parametrize("fault", ["pause", "cut"])
def test_asynchronous_away_and_back(container_job: Make, fault: str) -> None:
    job = container_job(*SERVED, *SOON, *ENDLESS)
    following = job.start("up")
    following.until("epoch 1/")
    container = job.container("worker-1")
    job.cut("worker-1") if fault == "cut" else docker("pause", container)
    following.until("worker 1 has not been heard of for 3 s")
    following.until("epoch")  # the others go on
    following.until("epoch")
    job.rejoin("worker-1") if fault == "cut" else docker("unpause", container)
    following.until("worker 1 is back")
    following.until("epoch")


def test_a_server_crashed(container_job: Make) -> None:
    job = container_job(*SERVED, "--", "--epochs=8")
    following = job.start("up")
    following.until("epoch 2/")
    job.crash("ps-0")
    following.until("ps 0 ended and is started again")
    code, text = following.end()
    assert code == 0, text
