"""What docs/guides/containers.md promises of faults in containers: synchronous training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import LEAN
from tests.launch.containers import LIMIT, Following, Job, docker
from tests.launch.held import Held

pytestmark = pytest.mark.docker

Make = Callable[..., Job]
WORKERS = 2
EPOCHS = 3  # sums of floats drift apart later
FAULT_SECONDS = 10
STEPS = 125
"""Of an epoch."""

SCRIPT = f"""
import os
import torch
import spartito as sp

def gate(point):
    if os.path.exists("/scripts/gate"):
        print("waits before", point, flush=True)
        open("/scripts/gate", "rb", 0).read(1)

class Gate(sp.callbacks.Callback):
    def on_epoch_begin(self, epoch):
        gate(f"epoch {{epoch + 1}}")

gate("the meeting")
strategy = sp.strategy()
with strategy.scope():
    torch.manual_seed(1)
    net = sp.models.MnistMLP()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
trainer = sp.Trainer(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), strategy=strategy)
trainer.fit(
    sp.data.digits("training").shuffle().batch(64),
    epochs={EPOCHS},
    callbacks=[sp.callbacks.ModelCheckpoint(), Gate()],
)
strategy.close()
"""
"""In containers all wait before each step of the way, so that a fault meets the job where it is."""


def begin(job: Job, following: Following) -> None:
    """Have a job meet and train for an epoch; now it waits before the second one."""
    for point in ("the meeting", "epoch 1"):
        arrive(following, point)
        job.open_gate(WORKERS)
    arrive(following, "epoch 2")


def arrive(following: Following, point: str) -> None:
    for _ in range(WORKERS):
        following.until(f"waits before {point}")


def undisturbed(folder: Path) -> list[dict[str, Any]]:
    """The history of one device without containers."""
    (folder / "train.py").write_text(SCRIPT)
    told = {"SPARTITO_RUN_DIR": str(folder), "PYTHONPATH": str(LEAN), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(folder / "train.py")]
    subprocess.run(words, capture_output=True, timeout=LIMIT, check=True, env=os.environ | told)
    return [json.loads(x) for x in (folder / "history.jsonl").read_text().splitlines()]


def test_paused_then_cut_and_rejoined(container_job: Make, tmp_path: Path) -> None:
    job = container_job("--workers", "2", script=SCRIPT)
    following = job.start("up")
    begin(job, following)

    job.pause("worker-1")
    job.open_gate(WORKERS)
    end = time.monotonic() + FAULT_SECONDS
    expected = undisturbed(tmp_path)
    time.sleep(max(0.0, end - time.monotonic()))  # the fault itself
    assert len(job.history) == 1
    job.unpause("worker-1")
    arrive(following, "epoch 3")

    job.cut("worker-1")
    job.open_gate(WORKERS)
    time.sleep(FAULT_SECONDS)
    assert len(job.history) == 2
    job.rejoin("worker-1")

    code, text = following.end()
    assert code == 0, text
    assert "[worker 0] " in text
    model = next((job.run_folder / "checkpoints").glob("*/model.safetensors"))
    assert model.stat().st_size > 0
    assert job.remains == []
    assert len(expected) == EPOCHS
    for here, there in zip(job.history, expected, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_containers_are_killed_and_the_others_go_on(container_job: Make) -> None:
    """A worker, the chief, the store, and one that is paused: the numbers are as without."""
    words = ("--workers", "2", "--recover", "--", "--epochs=6")
    job, quiet = container_job(*words), container_job(*words)
    lost = {STEPS: "worker-1", 2 * STEPS: "store", 3 * STEPS: "worker-0", 4 * STEPS: "worker-1"}
    held = Held(job.run_folder / "held", *lost, 5 * STEPS, inside="/runs/held")
    held.tell(job.file)
    following = job.start("up")
    for step, service in lost.items():
        held.wait(step, "worker-0", "worker-1")
        docker("kill", job.container(service))
        held.let_go(step)
        back = {"store": [], "worker-0": ["takes part"]}.get(service, ["goes on after"])
        name = service.replace("-", " ")
        following.until(f"{name} was killed by signal 9; it is started again", *back)
    held.wait(5 * STEPS, "worker-0", "worker-1")
    job.pause("worker-0")
    held.let_go(5 * STEPS)
    following.until("worker 0 stands still; it is started again")
    code, text = following.end()
    assert code == 0, text
    assert job.remains == []
    code, text = quiet.does("up")
    assert code == 0, text
    for here, there in zip(job.history, quiet.history, strict=True):
        for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
            assert here[name] == there[name]


@pytest.mark.night
def test_killed_or_away_beyond_the_time_limit(container_job: Make) -> None:
    words = ("--workers", "2", "--timeout", "5")
    killed, paused, cut = jobs = [container_job(*words, script=SCRIPT) for _ in range(3)]
    following = [job.start("up") for job in jobs]
    for job, one in zip(jobs, following, strict=True):
        begin(job, one)
    docker("kill", killed.container("worker-1"))
    paused.pause("worker-1")
    cut.cut("worker-1")
    for job in jobs:
        job.open_gate(WORKERS)
    ends = [one.end() for one in following]
    assert [code for code, _ in ends] == [69, 69, 69], ends
    assert "worker 1 was killed by signal 9" in ends[0][1]
    for _, text in ends[1:]:
        assert "[worker 0] spartito: error: worker 1" in text
        assert "within 5 s" in text
    assert [job.remains for job in jobs] == [[], [], []]
