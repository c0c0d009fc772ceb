"""Where nobody looks, a step reads no tensor's value: a GPU would be waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spartito.data.batch import Batch
from spartito.engine.loss import evaluate_loss, weigh
from spartito.training.metrics.names import make_metrics
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
    """With weights of classes the loss is a tensor, also in the host's memory."""
    name, world_size, options = engine
    settings = {"classes": True}
    found = replicas(jobs.reads_per_step, world_size, name, options, settings, looks=True)
    assert all(1 <= each <= 2 for each in found)


@pytest.mark.parametrize("ignored", [-100, 0])
def test_a_loss_on_another_device_is_not_read(ignored: int) -> None:
    """A tensor on "meta" has no value: whoever reads it fails."""
    output = torch.randn(4, 3, device="meta", requires_grad=True)
    target = torch.zeros(4, dtype=torch.int64, device="meta")
    batch = Batch((output, target), 4, 4, torch.arange(4), 0, 0)
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    found = weigh(evaluate_loss(loss, output, batch), batch)
    assert isinstance(found.total, torch.Tensor)
    for metric in make_metrics(["accuracy", "top_2", "f1", "confusion_matrix"], loss):
        metric.update(output, target, 4)
