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

DDP = "mirrored", 2, {"communication": "ddp"}
"""On CPUs, where any read counts: DDP takes no simulated device."""


def test_every_way_to_read_is_counted() -> None:
    assert jobs.counted(torch.tensor([1, 2, 1])) >= 6


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate": 2, "clip_norm": 0.5}, {"classes": True}, {"precision": "bf16"}],
    ids=["plain", "accumulate-clip", "class-weights", "bf16"],
)
def test_a_step_reads_nothing(
    accelerators: Replicas, replicas: Replicas, settings: dict[str, Any]
) -> None:
    assert accelerators(jobs.reads_per_step, 1, "one_device", {}, settings) == [0.0]
    if "classes" not in settings:  # these are summed in the host's memory
        assert replicas(jobs.reads_per_step, 2, *DDP[::2], settings) == [0.0, 0.0]


def test_who_looks_reads(accelerators: Replicas, replicas: Replicas) -> None:
    """With weights of classes the loss is a tensor, also in the host's memory."""
    settings = {"classes": True}
    (one,) = accelerators(jobs.reads_per_step, 1, "one_device", {}, settings, looks=True)
    assert one == 1
    found = replicas(jobs.reads_per_step, 2, *DDP[::2], settings, looks=True)
    assert all(1 <= each <= 3 for each in found)


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
