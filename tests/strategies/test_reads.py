"""Where nobody looks, a step reads no tensor's value: a GPU would be waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spartito.data.batch import Batch
from spartito.engine.losses.loss import evaluate_loss, weigh
from spartito.training.metrics.names import make_metrics
from tests.replicas import Replicas
from tests.strategies import reading_jobs as jobs
from tests.strategies.test_contracts import Case, named, servers

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


BY_GROUP: list[tuple[Case, float, int]] = [
    (("one_device", 1, {}), 0, 0),
    (("mirrored", 2, {}), 0, 0),
    (("mirrored", 2, {"communication": "process_group"}), 0, 0),
    (("multi_worker_mirrored", 2, {}), 0, 0),
    (("tpu", 2, {}), 0, 0),
    (("sharded", 3, {"zero": 1}), 0, 0),
    (("sharded", 2, {}), 0, 0),
    (("sharded", 3, {"communication": "fsdp", "block_bytes": 100}), 0, 0),
    (("mesh", 2, {"model": 2}), 0, 0),
    (("mesh", 4, {"mesh": {"data": 2, "model": 2}, "zero": 1}), 0, 0),
    (("pipeline", 2, {"microbatches": 3}), 0, 0),
    (("local_sgd", 3, {"groups": [[0, 2], [1]], "every": 3}), 1, 0),
]
"""Strategies whose devices a process group joins; how often a step may bring something to the host,
and an evaluation for each further batch. What the host has to know goes by a group of the host.

`local_sgd` reads three times at a meeting of its groups, here after every third
update: that the replicas of a group are equal, before the merged values replace theirs, and how far
the groups have moved, which they tell each other. Between meetings it reads nothing.
"""
THROUGH_HOST: list[Case] = [
    ("central_storage", 2, {}),
    ("parameter_server", 2, {"max_staleness": 0}),
]
"""Strategies that keep the parameters in the host's memory."""
STAGED: list[Case] = [
    ("mirrored", 2, {}),
    ("sharded", 2, {}),
    ("mesh", 2, {"model": 2}),
]
"""Strategies whose devices no process group joins, as tasks share them: what is summed is copied to
the host, and that is counted apart from reads."""


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 2, "clip_norm": 0.5},
        {"classes": True},
        {"precision": "bf16"},
        {"deterministic": True},
    ],
    ids=["accumulate-clip", "class-weights", "bf16", "deterministic"],
)
@pytest.mark.parametrize(
    "case",
    [("mirrored", 2, {}), ("sharded", 2, {}), ("mesh", 2, {"model": 2})],
    ids=["mirrored", "sharded", "mesh"],
)
def test_a_step_of_several_tasks_reads_nothing(
    accelerator_groups: Replicas, case: Case, settings: dict[str, Any]
) -> None:
    name, tasks, options = case
    found = accelerator_groups(jobs.reads_per_step, tasks, name, options, settings)
    assert found == [0.0] * tasks


@pytest.mark.parametrize(
    ("case", "step", "look"), BY_GROUP, ids=[named(case) for case, *_ in BY_GROUP]
)
def test_no_parameters_pass_through_the_host(
    accelerator_groups: Replicas, case: Case, step: float, look: int
) -> None:
    name, tasks, options = case
    for found in accelerator_groups(jobs.costs_per_step, tasks, name, options):
        assert found["reads"] + found["copies to host"] <= step
        assert found["bytes to host"] < found["parameters"] / 4
        assert found["waits of an evaluation"] <= look
        assert found["waits of a pass"] <= 1 + 3 * look


@pytest.mark.parametrize("case", [pytest.param(case, id=named(case)) for case in THROUGH_HOST])
def test_parameters_cross_once_where_the_host_keeps_them(
    accelerators: Replicas, case: Case
) -> None:
    """Values to the device, and gradients back."""
    name, tasks, options = case
    for found in accelerators(jobs.costs_per_step, tasks, name, options, servers=servers(case)):
        assert found["reads"] <= 1
        assert found["bytes to host"] < found["parameters"] * 1.25
        assert found["bytes to device"] < found["parameters"] * 1.25
        assert found["waits of an evaluation"] == 0


@pytest.mark.parametrize("case", [pytest.param(case, id=named(case)) for case in STAGED])
def test_what_goes_through_the_host_is_copied_and_little_read(
    accelerators: Replicas, case: Case
) -> None:
    name, tasks, options = case
    for found in accelerators(jobs.costs_per_step, tasks, name, options):
        assert found["copies to host"] > 0
        assert found["reads"] <= 1


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
