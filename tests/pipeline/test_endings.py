"""How jobs of pipelines end: codes, and what their users read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import Commands, commands_in

JOB = """
import os, signal, sys
import torch
from torch import nn
import spartito as sp

def loss(output, target):
    if sys.argv[1] == "error":
        raise ValueError("labels of another world")
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.mse_loss(output, target)

torch.manual_seed(0)
x = torch.randn(8, 3)
trainer = sp.Trainer(
    nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
    optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    loss=loss,
    strategy=sp.strategy("pipeline", communication=sys.argv[2]),
)
trainer.fit(sp.data.arrays(x, x).batch(4), epochs=1)
"""
STOPPED = "worker 1 was stopped because"
LOST = f"{STOPPED} worker 0 was killed by SIGKILL"


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    ("workers", "what", "code", "last"),
    [
        pytest.param(
            *("3", "too many", 2, "split=[...]: modules that the forward pass calls one after"),
            marks=pytest.mark.slow,
        ),
        ("2", "error", 1, "ValueError: labels of another world"),
        pytest.param("2", "kill", 69, LOST, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("way", ["auto", "sockets"])
def test_the_cause_of_an_end_is_read_last(
    commands: Commands, way: str, workers: str, what: str, code: int, last: str
) -> None:
    job = commands.write("job.py", JOB)
    words = ("--strategy", "pipeline", "--workers", workers, job, what.replace(" ", "-"), way)
    ended = commands.spartito("run", *words)
    assert ended.code == code, ended.text
    # after the cause may come what the launcher did about it, where worker 1 was slow to end
    lines = [line for line in ended.err.splitlines() if last == LOST or STOPPED not in line]
    # Two processes write, and notes stand under an error of the user.
    assert any(last in line for line in lines[-4:]), ended.text
    if what == "too many":
        assert "spartito: error: 3 stages of a model that has 2 layers in a row" in ended.err
    assert "is gone" not in ended.text
    assert sum("Traceback" in line for line in lines) == (what == "error")


@pytest.mark.slow
def test_a_refusal_ends_a_recipe_with_2(commands: Commands) -> None:
    options = '{"schedule": "interleaved:40"}'
    words = ("train", "gpt", "--strategy", "pipeline", "--workers", "2", "--epochs", "1")
    ended = commands.spartito(*words, "--strategy-options", options, "--out", "out")
    assert ended.code == 2, ended.text
    assert "spartito: error: 80 stages of a model that has" in ended.err
    assert "Traceback" not in ended.text
