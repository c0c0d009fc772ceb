"""What docs/guides/containers.md promises of faults in containers: asynchronous training."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

from tests.launch.containers import Job, docker

pytestmark = pytest.mark.docker

Make = Callable[..., Job]
SERVED = ("--workers", "2", "--ps", "1")
SOON = ("--strategy-options", '{"servers": {"lease_seconds": 3, "snapshot_seconds": 1}}')
"""A silent worker is given up before the fault has passed."""

SCRIPT = """
import sys
import torch
import spartito as sp

passed = []

def gate(net, given):
    if net.training and not passed:
        print("has work", flush=True)
        passed.append(open("/scripts/gate", "rb", 0).read(1))

strategy = sp.strategy()
with strategy.scope():
    net = sp.models.MnistMLP()
    net.register_forward_pre_hook(gate)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
trainer = sp.Trainer(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), strategy=strategy)
trainer.fit(
    sp.data.digits("training").shuffle().batch(64),
    epochs=int(sys.argv[1]),
    validation_data=sp.data.digits("validation").batch(500),
    callbacks=[sp.callbacks.ModelCheckpoint()],
)
strategy.close()
"""
"""Each worker waits amid its first work, so that a fault meets one that has some."""


def applied(job: Job) -> int:
    """The examples whose gradients the server has applied."""
    found = [json.loads(one.read_text()) for one in (job.run_folder / "tasks").glob("ps-*.json")]
    return sum(one["examples"] for one in found)


def test_a_worker_is_paused_then_cut_and_a_server_crashes(container_job: Make) -> None:
    job = container_job(*SERVED, *SOON, "--", "1000", script=SCRIPT)
    following = job.start("up")
    following.until("[worker 1] has work")
    job.open_gate(2)
    following.until("epoch 1/")

    for away, back in ((job.pause, job.unpause), (job.cut, job.rejoin)):
        away("worker-1")
        following.until("worker 1 has not been heard of for 3 s")
        following.until("[worker 0] epoch")  # the others go on
        following.until("[worker 0] epoch")
        back("worker-1")
        following.until("worker 1 is back")
        following.until("[worker 0] epoch")

    job.crash("ps-0")
    following.until("goes on from its snapshot", "ps 0 (ps-0:29500) was started again")
    following.until("[worker 0] epoch")
    assert "".join(following.seen).count("is started again") == 1  # nobody else


def test_a_worker_crashes_then_is_killed_for_good(container_job: Make) -> None:
    job = container_job(*SERVED, "--evaluator", "--", "2", script=SCRIPT)
    following = job.start("up")
    following.until("[worker 1] has work")
    job.crash("worker-1")
    following.until("worker 1 ended and is started again", "[worker 1] has work")
    docker("kill", job.container("worker-1"))
    job.open_gate(1)
    code, text = following.end()
    assert code == 0, text
    assert text.count("is started again") == 1
    assert text.count("worker 1 is gone: its work goes to others") == 2
    assert applied(job) == 2 * 8000
    assert next((job.run_folder / "checkpoints").glob("*/model.safetensors")).stat().st_size > 0
    assert (job.run_folder / "evaluations.jsonl").read_text().strip()
    assert job.remains == []


def test_down_asks_all_tasks_at_once(container_job: Make) -> None:
    """A server serves as long as its chief is there, which would be asked after it."""
    job = container_job(*SERVED, "--", "1000", script=SCRIPT)
    following = job.start("up")
    job.open_gate(2)
    following.until("epoch 1/")
    assert job.does("down")[0] == 0
    assert job.remains == []
    codes = job.codes()  # more than three where a worker has lost the other before it heard
    assert len(codes) >= 3
    assert 128 + signal.SIGKILL not in codes


COMES_LATE = """
import json, os, pathlib, signal, time

role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
known = pathlib.Path("/runs/known")
if role == "ps" and known.exists():
    time.sleep(3600)
if role == "ps":
    known.touch()
    open("/scripts/gate", "rb", 0).read(1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_that_comes_back_when_the_work_is_done_holds_nobody(container_job: Make) -> None:
    job = container_job("--chief", "--workers", "1", "--ps", "1", script=COMES_LATE)
    assert job.does("up", "--detach")[0] == 0
    chief = job.container("chief")
    assert docker("wait", chief).strip() == "0"
    job.open_gate(1)
    code, text = job.does("wait")
    assert code == 0, text
    assert "ps 0 came too late; the job has ended" in text
    code, text = job.does("status")
    assert code == 0, text
    assert text.endswith("has ended: all is well\n")
