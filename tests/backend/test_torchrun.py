"""Groups under torchrun, whose store outlives them, and processes that were killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands import commands_in

SCRIPT = """
import os, signal
import spartito_backend, torch
import torch.distributed as dist

spartito_backend.register()
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for turn in range(3):
    dist.init_process_group("spartito")
    group = dist.new_group([0, 1])
    values = torch.tensor([dist.get_rank() + 1.0 + turn + 10 * restarts])
    dist.all_reduce(values, group=group)
    assert values.item() == 3.0 + 2 * turn + 20 * restarts, values
    if turn == 1 and not restarts and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(values)
    dist.destroy_process_group()
os.write(1, f"found all after {restarts}\\n".encode())  # both ranks write there
"""


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.slow
def test_a_process_makes_its_group_anew_and_is_started_again(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        commands.write("train.py", SCRIPT)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--max-restarts=1", "--nproc-per-node=2"]
        ended = commands.start(*torchrun, "train.py").end()
        assert ended.code == 0, ended.text
        assert ended.out.count("found all after 1") == 2, ended.text
