"""Jobs as a user has them: no parent that imported torch, nothing that makes tests quick."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands import Commands, commands_in
from tests.launch.containers import BUILT, Job, need_image

SCRIPT = """
import os, sys
import torch
import spartito as sp

torch.manual_seed(0)
net = torch.nn.Linear(4, 2)
x, y = torch.randn(32, 4), torch.arange(32) % 2
trainer = sp.Trainer(net, optimizer=torch.optim.Adam(net.parameters(), 0.1),
                     loss=torch.nn.CrossEntropyLoss(), strategy=sp.strategy())
losses = trainer.fit((x, y), epochs=3, batch_size=8, verbose=0).history["loss"]
lean = [path for path in sys.path if path.endswith("tests/lean")]
print("cold", losses[2] < losses[0], lean, flush=True)
"""


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as found:
        found.write("train.py", SCRIPT)
        yield found


AS_A_USER = {"PYTHONPATH": ""}
"""An environment without what makes tests quick."""


@pytest.mark.slow
def test_run(commands: Commands) -> None:
    ended = commands.spartito("run", "--workers", "2", "train.py", env=AS_A_USER)
    assert ended.code == 0, ended.text
    assert ended.out.count("cold True []") == 2, ended.text


@pytest.mark.slow
def test_train_with_servers(commands: Commands) -> None:
    words = ("train", "mnist", "--ps", "1", "--workers", "2", "--epochs", "1", "--out", "out")
    ended = commands.spartito(*words, env=AS_A_USER)
    assert ended.code == 0, ended.text
    assert (commands.directory / "out" / "report.html").is_file()


@pytest.mark.docker
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.night, id="no limit"),
        pytest.param(("--memory", "500m"), id="small memory"),
    ],
)
def test_the_image_that_users_build(
    container_job: Callable[..., Job], options: tuple[str, ...]
) -> None:
    """As built by `spartito cluster image`, of which the image of other tests is a lean copy."""
    need_image()
    job = container_job("--workers", "2", f"--image={BUILT}", *options, script=SCRIPT)
    code, text = job.does("up")
    assert code == 0, text
    assert text.count("cold True []") == 2, text
