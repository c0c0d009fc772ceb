"""Complex parameters, whole numbers, truth values and 8-bit floats train, are saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replicas import ReplicaError, Replicas
from tests.strategies import dtype_jobs

Case = tuple[str, int, dict[str, Any]]

CASES: list[Case] = [
    ("one_device", 1, {}),
    ("mirrored", 2, {}),
    ("mirrored", 2, {"communication": "process_group"}),
    ("mirrored", 2, {"communication": "ddp"}),
    ("multi_worker_mirrored", 2, {"communication": "sockets"}),
    ("central_storage", 2, {}),
    ("sharded", 2, {}),
    ("sharded", 2, {"communication": "sockets", "block_bytes": 100}),
    ("mesh", 2, {"model": 2}),
    ("pipeline", 2, {}),
]


def name_of(case: Case) -> str:
    return "-".join(map(str, [case[0], *case[2].values()]))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_unusual_tensors_train_and_come_back(
    replicas: Replicas, case: Case, tmp_path: Path
) -> None:
    name, world_size, options = case
    expected = dtype_jobs.by_torch()
    for found in replicas(dtype_jobs.by_strategy, world_size, name, options, str(tmp_path)):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key].dtype == value.dtype
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["one_device", "central_storage", "pipeline"])
def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step(
    replicas: Replicas, name: str
) -> None:
    world_size = 1 if name == "one_device" else 2
    with pytest.raises(ReplicaError, match="weight is of complex128, which no checkpoint"):
        replicas(dtype_jobs.wide, world_size, name, {})
