"""In the default mode every synchronous strategy gives the numbers of a plain loop of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.replicas import Replicas
from tests.strategies import plain_jobs as jobs

STRATEGIES: list[tuple[str, int, dict[str, Any]]] = [
    ("one_device", 1, {}),
    ("mirrored", 2, {}),
    ("mirrored", 2, {"communication": "ddp"}),
    ("multi_worker_mirrored", 2, {"communication": "sockets"}),
    ("central_storage", 2, {}),
]
every_strategy = pytest.mark.parametrize(
    "given", STRATEGIES, ids=lambda given: "-".join([given[0], *given[2].values()])
)
CASES: dict[str, dict[str, Any]] = {
    "uneven": {},
    "accumulate-clip-schedule": {"accumulate": 2, "clip_norm": 0.05, "schedule": True},
    "class-weights": {"classes": True, "accumulate": 2},
}


def compare(found: dict[str, Any], expected: dict[str, Any], exact: float) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=0, abs=exact)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=exact)


@every_strategy
@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_a_plain_loop(
    replicas: Replicas, given: tuple[str, int, dict[str, Any]], case: str
) -> None:
    name, world_size, options = given
    expected = jobs.by_torch(CASES[case])
    for found in replicas(jobs.by_strategy, world_size, name, options, CASES[case]):
        compare(found, expected, 1e-12)


@every_strategy
def test_a_training_that_was_resumed_is_one_that_was_not(
    replicas: Replicas, given: tuple[str, int, dict[str, Any]], tmp_path: Path
) -> None:
    name, world_size, options = given
    case = {"schedule": True, "accumulate": 2}
    expected = jobs.by_torch(case)
    for found in replicas(
        jobs.by_strategy, world_size, name, options, case, torch.float64, tmp_path
    ):
        compare(found, expected, 1e-12)


@every_strategy
def test_synchronized_batchnorm_is_batchnorm_of_the_global_batch(
    replicas: Replicas, given: tuple[str, int, dict[str, Any]]
) -> None:
    name, world_size, options = given
    case = {"norm": nn.BatchNorm1d}
    expected = jobs.by_torch(case)
    on = {**options, "sync_batchnorm": True}
    for found in replicas(jobs.by_strategy, world_size, name, on, case):
        compare(found, expected, 1e-12)
    asks = {} if "ddp" in options.values() else {"norm": nn.SyncBatchNorm}  # torch's DDP refuses it
    for found in replicas(jobs.by_strategy, world_size, name, options, asks) if asks else ():
        compare(found, expected, 1e-12)
    if world_size > 1:  # without it each replica normalizes its own rows
        local = replicas(jobs.by_strategy, world_size, name, options, case)[0]
        with pytest.raises(AssertionError):
            compare(local, expected, 1e-6)


@every_strategy
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_that_of_torch(
    replicas: Replicas, given: tuple[str, int, dict[str, Any]], precision: str
) -> None:
    name, world_size, options = given
    case = {"precision": precision, "clip_norm": 0.5}
    expected = jobs.by_torch(case, torch.float32)
    full = jobs.by_torch({"clip_norm": 0.5}, torch.float32)
    for found in replicas(jobs.by_strategy, world_size, name, options, case, torch.float32):
        compare(found, expected, 1e-6 if world_size == 1 else 2e-2)
        assert found["scale"] == expected["scale"]
    assert expected["loss"] != pytest.approx(full["loss"], rel=0, abs=1e-6)


@every_strategy
def test_an_overflow_on_one_replica_leaves_the_step_out_on_all(
    replicas: Replicas, given: tuple[str, int, dict[str, Any]]
) -> None:
    name, world_size, options = given
    # Row 6, of the last replica, makes gradients that fp16 cannot hold until the scale is smaller.
    case = {"precision": "16-mixed", "huge": 6, "times": 3000.0}
    expected = jobs.by_torch({**case, "precision": "fp16"}, torch.float32)
    assert 0 < expected["scale"] < 65536
    found = replicas(jobs.by_strategy, world_size, name, options, case, torch.float32)
    for each in found:
        assert each["scale"] == expected["scale"]
        compare(each, found[0], 0.0)
        if world_size == 1:
            compare(each, expected, 1e-6)


def test_a_norm_without_running_statistics_is_not_evaluated_by_rows_of_each_replica(
    replicas: Replicas,
) -> None:
    stages = {"stages": 2, "microbatches": 2, "split": ["1"]}
    for name, options in (("mirrored", {}), ("pipeline", stages)):
        for dropped in (False, True):
            for said in replicas(jobs.evaluation_refused, 2, name, options, True, dropped):
                assert "BatchNorm1d '1' keeps no running statistics" in said
    assert replicas(jobs.evaluation_refused, 1, "one_device", {}, True) == [""]
    assert replicas(jobs.evaluation_warned_of, 2) == [True, True]
