"""What the table of faults in docs/clusters.md promises of asynchronous training, in containers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.launch.containers import Job, docker

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

Make = Callable[..., Job]
ENDLESS = ("--", "--epochs=1000")
SERVED = ("--workers", "2", "--ps", "1")
SOON = ("--strategy-options", '{"lease_seconds": 3}')
"""A silent worker is given up before the fault has passed."""


def applied(job: Job) -> int:
    """The examples whose gradients the server has applied."""
    found = [json.loads(one.read_text()) for one in (job.run_folder / "tasks").glob("ps-*.json")]
    return sum(one["examples"] for one in found)


def test_asynchronous_crashed(container_job: Make) -> None:
    job = container_job(*SERVED, "--", "--epochs=8")
    following = job.start("up")
    following.until("epoch 1/")
    job.crash("worker-1")
    following.until("worker 1 ended and is started again")
    code, text = following.end()
    assert code == 0, text
    assert applied(job) == 8 * 8000


def test_asynchronous_killed_for_good(container_job: Make) -> None:
    job = container_job(*SERVED, "--", "--epochs=6")
    following = job.start("up")
    following.until("epoch 1/")
    docker("kill", job.container("worker-1"))
    code, text = following.end()
    assert code == 0, text
    assert applied(job) == 6 * 8000


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
