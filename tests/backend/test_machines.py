"""Ranks on two machines, which are network namespaces with memory of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spartito.launch.lines.network import NoNamespacesError, network
from tests.commands import commands_in
from tests.skips import need, skip

SCRIPT = """
import warnings
import spartito_backend, torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

spartito_backend.register()
dist.init_process_group("spartito")
rank = dist.get_rank()
small, large = torch.tensor([rank + 1.0]), torch.full((70000,), rank + 1.0)
def sent():
    with open("/proc/net/dev") as lines:
        line = next(line for line in lines if "eth0" in line)
    return int(line.split(":")[1].split()[8])


before = sent()
dist.all_reduce(torch.ones(1 << 20))
dist.broadcast(torch.ones(1 << 20), 1)
dist.barrier()
assert sent() - before < (9 << 20 if rank < 2 else 5 << 20), sent() - before  # once for a machine
dist.all_reduce(small)
dist.all_reduce(large)
warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for it
gathered = functional.all_gather_tensor(torch.tensor([rank]), 0, dist.group.WORLD)
inside = dist.new_group([2, 3])
if rank > 1:
    dist.broadcast(small, 2, group=inside)
dist.barrier()
dist.destroy_process_group()
print("found", small.item(), large.min().item(), large.max().item(), gathered.tolist())
"""


@pytest.mark.slow
def test_four_ranks_on_two_machines_whose_names_mean_the_loopback(tmp_path: Path) -> None:
    at = {"MASTER_ADDR": "alpha", "MASTER_PORT": "29533", "WORLD_SIZE": "4"}
    need("netns")
    try:
        with (
            network("alpha", "beta", own_name="127.0.1.1") as machines,
            commands_in(tmp_path) as commands,
        ):
            commands.write("train.py", SCRIPT)
            programs = [
                commands.start(
                    *machines[rank // 2].enters, sys.executable, "train.py",
                    env={**at, "RANK": str(rank)},
                )
                for rank in range(4)
            ]  # fmt: skip
            for program in programs:
                ended = program.end()
                assert ended.code == 0, ended.text
                assert "found 10.0 10.0 10.0 [0, 1, 2, 3]" in ended.out, ended.text
    except NoNamespacesError as error:
        skip("netns", error)
