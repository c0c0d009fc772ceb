from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.containers import LIMIT, SPARTITO, Job, docker

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]


def test_two_workers_train_as_local_processes_do(
    container_job: Callable[..., Job], tmp_path: Path
) -> None:
    two = container_job("--workers", "2", "--", "--epochs=1")
    code, text = two.does("up")
    assert code == 0, text
    assert "[worker 0] " in text
    model = next((two.run_folder / "checkpoints").glob("*/model.safetensors"))
    assert model.stat().st_size > 0
    assert two.remains == []
    local = tmp_path / "local"
    subprocess.run(
        [*SPARTITO, "train", "mnist", "--workers", "2", "--epochs", "1", "--out", str(local)],
        capture_output=True,
        timeout=LIMIT,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    expected = [json.loads(x) for x in (local / "history.jsonl").read_text().splitlines()]
    for here, there in zip(two.history, expected, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-3)


def test_workers_that_share_ipc_use_shared_memory(container_job: Callable[..., Job]) -> None:
    two = container_job("--workers", "2", "--share-ipc", "--", "--epochs=1000")
    two.start("up").until("epoch 1/")
    look = "cat /proc/[0-9]*/maps; true"
    for name in ("worker-0", "worker-1"):
        assert "/dev/shm/spartito-" in docker("exec", two.container(name), "sh", "-c", look)
    assert two.does("down")[0] == 0
    assert two.remains == []


def test_servers_and_an_evaluator(container_job: Callable[..., Job]) -> None:
    served = container_job("--workers", "2", "--ps", "1", "--evaluator", "--", "--epochs=1")
    code, text = served.does("up")
    assert code == 0, text
    assert next((served.run_folder / "checkpoints").glob("*/model.safetensors")).stat().st_size > 0
    assert (served.run_folder / "evaluations.jsonl").read_text().strip()
    assert served.remains == []


def test_a_detached_job_is_there_until_it_is_taken_down(container_job: Callable[..., Job]) -> None:
    two = container_job("--workers", "2", "--", "--epochs=1000")
    code, text = two.does("up", "--detach")
    assert code == 0, text
    code, text = two.does("status")
    assert (code, text.count("running")) == (0, 2), text
    code, text = two.does("up")
    assert code == 2
    assert f"there is a job {two.name} already" in text
    assert two.does("down")[0] == 0
    assert two.remains == []
    assert two.does("status")[0] == 2


def test_a_job_that_is_taken_down_by_somebody_else(container_job: Callable[..., Job]) -> None:
    two = container_job("--workers", "2", "--", "--epochs=1000")
    following = two.start("up")
    following.until("epoch 1/")
    assert two.does("down")[0] == 0
    code, text = following.end()
    assert code == 69, text
    assert "engine failed" not in text
    assert two.remains == []
