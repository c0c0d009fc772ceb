"""Jobs of two processes that are killed whole, wherever they are, and while they write."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import pytest

from tests.commands import SPARTITO, Ended, Program, commands_in, eventually

SCRIPT = """
import sys
import torch
from torch import nn
import spartito as sp

class Show(sp.Callback):
    def set_trainer(self, trainer):
        super().set_trainer(trainer)
        if strategy.is_evaluator:  # which hears signals from here on
            print(strategy.task, "is there", flush=True)

    def on_train_batch_end(self, batch, logs):
        if self.trainer.is_chief:
            print("step", self.trainer.step, logs["loss"].hex(), flush=True)

strategy = sp.strategy()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 3))
trainer = sp.Trainer(
    net, optimizer=torch.optim.Adam(net.parameters()), loss=nn.CrossEntropyLoss(),
    strategy=strategy, seed=1, run_dir="run",
)
x = torch.randn(400, 4, generator=torch.Generator().manual_seed(2))
y = x[:, :3].argmax(1)
data = sp.data.arrays(x, y).shuffle().batch(8)
backup = sp.callbacks.BackupAndRestore("kept", every=7, share=None)
try:
    trainer.fit(
        data, epochs=int(sys.argv[1]), validation_data=(x, y), callbacks=[Show(), backup], verbose=0
    )
except sp.PreemptedError:
    print(strategy.task, "leaves", flush=True)
    raise
print("ended after", trainer.step, flush=True)
strategy.close()
"""
EPOCHS = 12
STEPS = EPOCHS * 50


def losses(ended: Ended) -> dict[int, str]:
    """The losses that were shown, by step."""
    found = re.findall(r"step (\d+) (-?0x\S+)\n", ended.out)
    return {int(step): loss for step, loss in found}


def went_on(ended: Ended) -> int:
    """The step of the backup from which a job went on."""
    found = re.search(r"going on after step (\d+)", ended.text)
    assert found, ended.text
    return int(found[1])


def begun(program: Program, kept: Path) -> None:
    """Wait until there is a backup."""
    assert eventually(lambda: any(kept.glob("fit-1/step-*")), 120.0), program.with_stacks()


def killed(program: Program, kept: Path, most: int) -> Ended:
    """SIGKILL for the launcher and all tasks, some steps after the first backup."""
    begun(program, kept)
    for _ in range(random.Random(str(kept)).randrange(most)):
        program.wait_for("^.*step ")
    program.kill()
    return program.end()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored", "parameter_server --ps 1 --chief"])
def test_it_goes_on_after_all_were_killed(tmp_path: Path, strategy: str) -> None:
    with commands_in(tmp_path) as commands:
        script = commands.write("train.py", SCRIPT)
        job = [*SPARTITO, "run", "--workers", "2", "--strategy", *strategy.split()]
        job += [str(script), str(EPOCHS)]
        kept = tmp_path / "kept"
        parts = [killed(commands.start(*job), kept, 100 if strategy == "mirrored" else 1)]
        writing = {"SPARTITO_FAILPOINT": "storage.directory.before_manifest:kill:5"}
        parts.append(commands.start(*job, env=writing).end())
        assert parts[1].code != 0
        parts.append(commands.start(*job).end())
        assert parts[2].code == 0, parts[2].text
        assert not any(kept.iterdir())
        began = [went_on(part) for part in parts[1:]]
        if strategy == "mirrored":
            # What the launcher had not passed on when it was killed is not among the losses.
            assert [min(losses(part)) for part in parts[1:]] == [step + 1 for step in began]
            assert 1 < began[0] < began[1] <= max(losses(parts[1]))
            whole = losses(commands.start(*job).end())
            assert [*whole] == [*range(1, STEPS + 1)]
            assert STEPS in losses(parts[2])
            for part in parts:
                assert losses(part).items() <= whole.items()


@pytest.mark.slow
def test_an_evaluator_ends_with_the_others_that_are_told_to(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        script = commands.write("train.py", SCRIPT)
        words = ["run", "--workers", "2", "--strategy", "mirrored", "--evaluator"]
        program = commands.start(*SPARTITO, *words, script, "1000000")  # until it is told to end
        program.wait_for("evaluator .* is there")
        begun(program, tmp_path / "kept")
        program.send(signal.SIGTERM)
        told = program.end()
        assert told.code == 75, told.text
        assert re.search(r"^.*evaluator\b.* leaves$", told.out, re.MULTILINE), told.text
