"""Where nobody looks, a step reads no tensor's value: a GPU would be waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.replicas import Replicas
from tests.strategies import reading_jobs as jobs

ENGINES: list[tuple[str, int, dict[str, Any]]] = [
    ("one_device", 1, {}),
    ("mirrored", 2, {"communication": "ddp"}),
]


def test_every_way_to_read_is_counted() -> None:
    assert jobs.counted(torch.tensor([1, 2, 1])) >= 6


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate": 2, "clip_norm": 0.5}, {"classes": True}, {"precision": "bf16"}],
    ids=["plain", "accumulate-clip", "class-weights", "bf16"],
)
@pytest.mark.parametrize("engine", ENGINES, ids=["one_device", "ddp"])
def test_a_step_reads_nothing(
    replicas: Replicas, engine: tuple[str, int, dict[str, Any]], settings: dict[str, Any]
) -> None:
    name, world_size, options = engine
    assert replicas(jobs.reads_per_step, world_size, name, options, settings) == [0.0] * world_size


@pytest.mark.parametrize("engine", ENGINES, ids=["one_device", "ddp"])
def test_who_looks_reads(replicas: Replicas, engine: tuple[str, int, dict[str, Any]]) -> None:
    name, world_size, options = engine
    found = replicas(jobs.reads_per_step, world_size, name, options, {}, looks=True)
    assert all(1 <= each <= 2 for each in found)
