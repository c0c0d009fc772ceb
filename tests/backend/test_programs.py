"""Training programs of plain torch give the same numbers when one word changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backend import jobs
from tests.replicas import Replicas

# Functions of tests/backend/programs, by name: their modules import much of torch.
ON_TWO = (
    "data_parallel.ddp",
    "data_parallel.ddp_many_buckets",
    "data_parallel.ddp_static_graph",
    "data_parallel.ddp_unused_parameters",
    "data_parallel.ddp_no_sync",
    "data_parallel.ddp_sparse",
    "data_parallel.ddp_join",
    "data_parallel.zero_join",
    "data_parallel.ddp_buffers",
    "data_parallel.ddp_hook_all_reduce",
    "data_parallel.ddp_hook_fp16",
    "data_parallel.ddp_hook_bf16",
    "data_parallel.ddp_hook_powersgd",
    "data_parallel.ddp_hook_local_sgd",
    "data_parallel.ddp_hook_of_ones_own",
    "data_parallel.ddp_several_forwards",
    "data_parallel.ddp_compiled",
    "data_parallel.ddp_profiled",
    "data_parallel.zero_redundancy",
    "data_parallel.sampler",
    "data_parallel.evaluated",
    "data_parallel.through_operations",
    "sharded.fsdp1",
    "sharded.fsdp1_state",
    "sharded.fsdp2",
    "sharded.fsdp2_mixed",
    "sharded.fsdp2_gpt",
    "model_parallel.dtensor",
    "model_parallel.tensor_parallel_mlp",
    "model_parallel.tensor_parallel_gpt",
    "model_parallel.sequence_parallel",
    "model_parallel.gpipe",
    "model_parallel.one_forward_one_backward",
    "sharded.saved_and_loaded",
    "sharded.saved_asynchronously",
)
ON_FOUR = ("sharded.hsdp", "sharded.hsdp1", "model_parallel.tensor_and_data_parallel")
QUICK = {
    "data_parallel.ddp",
    "data_parallel.ddp_unused_parameters",
    "data_parallel.ddp_sparse",
    "data_parallel.ddp_join",
    "data_parallel.ddp_hook_fp16",
    "data_parallel.zero_redundancy",
    "data_parallel.through_operations",
    "sharded.fsdp1",
    "sharded.fsdp2",
    "sharded.fsdp2_mixed",
    "model_parallel.dtensor",
    "model_parallel.tensor_parallel_mlp",
    "model_parallel.one_forward_one_backward",
    "sharded.saved_and_loaded",
    "sharded.hsdp",
}
"""One of each kind; the others make the same calls in other orders."""
ALL = [
    pytest.param(size, name, marks=() if name in QUICK else pytest.mark.slow)
    for size, names in ((2, ON_TWO), (4, ON_FOUR))
    for name in names
]


@pytest.mark.parametrize(("size", "program"), ALL)
def test_the_numbers_of_gloo(replicas: Replicas, size: int, program: str, tmp_path: Path) -> None:
    found = {}
    for backend in ("gloo", "spartito"):
        folder = tmp_path / backend
        folder.mkdir()
        found[backend] = replicas(jobs.program, size, backend, program, str(folder))
    assert found["spartito"] == found["gloo"]
    assert all(found["gloo"])
