"""Launchers whose output goes nowhere, and whose machine has no shared memory left."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import SPARTITO, Commands, commands_in
from tests.skips import skip, skip_if

PRINTS = "for number in range(100_000): print('line', number)\n"
RUN = shlex.join((*SPARTITO, "run", "--workers", "2", "prints.py"))


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as started:
        started.write("prints.py", PRINTS)
        yield started


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_from_the_start(commands: Commands, closed: str) -> None:
    ended = commands.start("sh", "-c", f"({RUN} {closed}); echo code $?").end()
    assert ended.out.endswith("code 0\n"), ended.text
    assert "Traceback" not in ended.text


@pytest.mark.parametrize(
    ("to", "said", "code"),
    [
        ("| head -1", "nobody reads stdout any more: the job ends", 1),
        pytest.param(
            "> /dev/full",
            "stdout cannot be written (No space left on device): lines of the job are lost",
            0,
            marks=skip_if(not Path("/dev/full").exists(), "case", "no /dev/full here"),
        ),
    ],
)
def test_it_is_said_once_that_nobody_takes_the_lines_of_a_job(
    commands: Commands, to: str, said: str, code: int
) -> None:
    ended = commands.start("sh", "-c", f"({RUN}; echo code $? >&2) {to}").end()
    assert ended.err.endswith(f"code {code}\n"), ended.text
    assert ended.err.count(said) == 1
    assert "Traceback" not in ended.text
    assert "Exception ignored" not in ended.text


NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount")
SHARED = {
    "full": "mount -t tmpfs -o size=64k tmpfs /dev/shm && head -c 64k /dev/zero > /dev/shm/full",
    "no more files": "mount -t tmpfs -o nr_inodes=1 tmpfs /dev/shm",
    "read-only": "mount -t tmpfs -o ro tmpfs /dev/shm",
}
TRAINS = """
import spartito as sp, torch

model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(32, 4), torch.ones(32, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
strategy = sp.strategy("mirrored")
trainer = sp.Trainer(model, optimizer=optimizer, loss=torch.nn.MSELoss(), strategy=strategy)
trainer.fit(data, batch_size=8, epochs=1)
"""


FIRST, *OTHERS = SHARED


@pytest.mark.parametrize(
    "shared", [FIRST, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_a_job_on_a_machine_without_shared_memory(commands: Commands, shared: str) -> None:
    if not shutil.which("unshare") or commands.start(*NAMESPACES, "true").end().code:
        skip("mount", "this machine allows no mounts of our own")
    commands.write("train.py", TRAINS)
    run = shlex.join((*SPARTITO, "run", "--workers", "2", "train.py"))
    ended = commands.start(*NAMESPACES, "sh", "-c", f"{SHARED[shared]} && {run}").end()
    assert ended.code == 0, ended.text
    assert "epoch 1/1" in ended.out
