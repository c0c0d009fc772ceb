"""Whole jobs that fail, freeze or are stopped: each ends, says who failed, and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spartito.checkpoint.manager import CheckpointManager, read_checkpoint
from spartito.errors import PREFIX
from spartito.models import MnistMLP
from tests.commands import (
    SPARTITO,
    Commands,
    Program,
    addresses,
    commands_in,
    eventually,
    tf_config,
)

LONG_SCRIPT = """
import os, sys
import torch
import spartito as sp

strategy = sp.strategy()
with strategy.scope():
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(net.parameters())

class Watch(sp.Callback):
    def on_train_batch_end(self, batch, logs):
        if self.trainer.step == 5:
            print("process", os.getpid(), "in step five", flush=True)
        if self.trainer.step == 6 and str(strategy.task) == sys.argv[1]:
            raise RuntimeError("boom")

x, y = torch.randn(64, 4), torch.arange(64) % 2
trainer = sp.Trainer(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(),
                     strategy=strategy)
callbacks = [Watch()]
if trainer.run_dir:
    callbacks.append(sp.callbacks.ModelCheckpoint(keep=2))
trainer.fit((x, y), epochs=1_000_000, batch_size=8, callbacks=callbacks, verbose=0)
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with commands_in(tmp_path_factory.mktemp("jobs")) as found:
        found.write("long.py", LONG_SCRIPT)
        yield found


# Failures: every job ends, says who failed, and leaves nothing


def begin(commands: Commands, fails: str = "nobody", **env: str) -> tuple[Program, dict[str, int]]:
    """A job of two workers that both are in training, and their process ids."""
    words = ["run", "--strategy", "mirrored", "--workers", "2", "long.py", fails]
    job = commands.start(*SPARTITO, *words, env=env)
    pids = {}
    for _ in range(2):
        found = job.wait_for(r"^\[(worker \d)\] process (\d+) in step five")
        pids[found[1]] = int(found[2])
    return job, pids


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.slow
def test_a_worker_that_raises(commands: Commands) -> None:
    job, _ = begin(commands, "worker 1")
    ended = job.end()
    assert ended.code == 1
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert ended.err.count("RuntimeError: boom") == 1
    assert "in on_train_batch_end" in ended.err
    assert "worker 1 failed with exit code 1" in ended.err


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize("task", ["worker 0", pytest.param("worker 1", marks=pytest.mark.slow)])
def test_a_worker_that_is_killed(commands: Commands, task: str) -> None:
    job, pids = begin(commands)
    os.kill(pids[task], signal.SIGKILL)
    ended = job.end()
    assert ended.code == 69
    assert f"{task} was killed by SIGKILL" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.slow
def test_a_worker_that_freezes_is_named_and_ended(commands: Commands) -> None:
    job, pids = begin(commands, SPARTITO_TIMEOUT="15")  # the start of both falls under it too
    os.kill(pids["worker 1"], signal.SIGSTOP)
    ended = job.end()  # fails if the frozen one is left
    assert ended.code == 69
    assert f"{PREFIX}worker 1 did not come within 15 s" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("here", [0, 1])
def test_a_worker_that_never_comes(commands: Commands, here: int) -> None:
    hosts = addresses(2)
    env = tf_config({"worker": hosts}, "worker", here) | {"SPARTITO_TIMEOUT": "6"}
    ended = commands.python("long.py", "nobody", env=env)
    assert ended.code == 69
    absent = 1 - here
    name = f"worker {absent} ({hosts[absent]})"
    *banner, waits, says, last = ended.err.splitlines()
    assert len(banner) == (here == 0)  # the chief says who is in the job
    waited = rf"spartito: waiting for {re.escape(name)}, for \d s now; the limit is 6 s"
    assert re.fullmatch(waited, waits), ended.text
    where = "" if absent == 0 else f" to {hosts[0]}"  # the address stands beside its name already
    assert says.startswith(f"{PREFIX}{name} did not come{where} within 6 s")
    assert last


def finished(folder: Path) -> bool:
    """Whether an epoch is over and saved."""
    return CheckpointManager(folder / "checkpoints").best_so_far is not None


def check_interrupted_run(folder: Path) -> dict[str, Any]:
    """The checkpoint of a run that was interrupted; its report is there, and counts its epochs."""
    latest = CheckpointManager(folder / "checkpoints").latest()
    assert latest is not None
    assert [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert "</html>" in (folder / "report.html").read_text()
    return read_checkpoint(latest)


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.slow
def test_ctrl_c_ends_the_command_and_keeps_what_is_saved(commands: Commands) -> None:
    words = ["train", "mnist", "--workers", "2", "--epochs", "1000", "--out", "stopped"]
    job = commands.start(*SPARTITO, *words)
    job.wait_for("epoch 2/1000")
    job.send(signal.SIGINT)
    ended = job.end()
    assert ended.code == 130
    assert ended.err.endswith("spartito: stopped by SIGINT\n")
    assert "Traceback" not in ended.err
    state = check_interrupted_run(commands.directory / "stopped")
    MnistMLP().load_state_dict(state["model"])
    assert state["trainer"]["step"] % 125 == 0


def test_ctrl_c_in_plain_python(commands: Commands) -> None:
    env = {"SPARTITO_RUN_DIR": "plainly_stopped"}
    job = commands.start(sys.executable, "long.py", "nobody", env=env, forks=True)
    folder = commands.directory / "plainly_stopped"
    assert eventually(lambda: finished(folder), 120), job.with_stacks()
    job.send(signal.SIGINT)
    ended = job.end()
    assert ended.code == -signal.SIGINT  # a shell makes 130 of it
    assert "KeyboardInterrupt" in ended.err
    state = check_interrupted_run(folder)
    assert state["trainer"]["step"] >= 8
