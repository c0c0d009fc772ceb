"""Groups under torchrun, whose store outlives them."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.commands import commands_in

SCRIPT = """
import spartito_backend, torch
import torch.distributed as dist

spartito_backend.register()
for turn in range(3):
    dist.init_process_group("spartito")
    values = torch.tensor([dist.get_rank() + 1.0 + turn])
    dist.all_reduce(values)
    assert values.item() == 3.0 + 2 * turn, values
    dist.destroy_process_group()
print("found all")
"""


def test_a_process_makes_its_group_anew(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        commands.write("train.py", SCRIPT)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ended = commands.start(*torchrun, "--nproc-per-node=2", "train.py").end()
        assert ended.code == 0, ended.text
        assert ended.out.count("found all") == 2, ended.text
