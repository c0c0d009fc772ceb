"""What the table of faults in docs/clusters.md promises of synchronous training, in containers."""

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
EPOCHS = 4
ENDLESS = ("--", "--epochs=1000")


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
