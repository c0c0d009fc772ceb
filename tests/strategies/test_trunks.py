"""Two optimizers on one model, and two models that share a trunk, are those of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.replicas import ReplicaError, Replicas
from tests.strategies import trunk_jobs

Case = tuple[str, int, dict[str, Any]]

CASES: list[Case] = [
    ("mirrored", 2, {}),
    ("mirrored", 2, {"communication": "ddp"}),
    ("central_storage", 3, {}),
    ("sharded", 2, {}),
    ("mesh", 2, {"model": 2}),
]
SLOWER: list[Case] = [
    ("one_device", 1, {}),
    ("multi_worker_mirrored", 2, {"communication": "sockets", "bucket_bytes": 64}),
    ("central_storage", 2, {}),
    ("sharded", 3, {"zero": 2, "block_bytes": 100}),
    ("sharded", 3, {"zero": 1}),
    ("sharded", 3, {"communication": "sockets", "block_bytes": 100}),
    ("mesh", 4, {"mesh": {"data": 2, "model": 2}}),
    ("local_sgd", 2, {"groups": 1, "every": 3, "outer": {"lr": 1.0, "momentum": 0.0}}),
]
KINDS = ["model", "model-tied-both", "trunk", "trunk-frozen-both"]
NIGHT = (pytest.mark.slow, pytest.mark.night)
SLOWER_KINDS = ["model-both", "model-frozen", "model-tied", "model-adafactor", "trunk-both"]


def name_of(case: Case) -> str:
    return "-".join(map(str, [case[0], case[1], *case[2].values()]))


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


every_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name_of(case), marks=NIGHT * (case in SLOWER))
        for case in CASES + SLOWER
    ],
)


@every_case
@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOWER_KINDS)]
)
def test_all_optimizers_learn_as_in_torch(replicas: Replicas, case: Case, kind: str) -> None:
    name, world_size, options = case
    if "adafactor" in kind and name in ("sharded", "mesh"):
        with pytest.raises(ReplicaError, match="may look at whole parameters"):
            replicas(trunk_jobs.by_strategy, world_size, name, options, kind)
        return
    expected = trunk_jobs.by_torch(kind)
    for found in replicas(trunk_jobs.by_strategy, world_size, name, options, kind):
        close(found, expected)


@every_case
def test_an_update_whose_gradients_another_has_cleared_is_refused(
    replicas: Replicas, case: Case
) -> None:
    name, world_size, options = case
    with pytest.raises(ReplicaError, match="SGD, and 8 of its parameters have lost their grad"):
        replicas(trunk_jobs.joint, world_size, name, options)


@every_case
def test_gradients_of_two_optimizers_are_weighed_once(replicas: Replicas, case: Case) -> None:
    name, world_size, options = case
    for found in replicas(trunk_jobs.waiting, world_size, name, options):
        close(found, trunk_jobs.waiting_by_torch())


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *(pytest.param(case, id=name_of(case), marks=NIGHT) for case in SLOWER),
    ],
    ids=name_of,
)
def test_a_second_trainer_of_a_model_goes_on_with_all_of_it(replicas: Replicas, case: Case) -> None:
    name, world_size, options = case
    for found in replicas(trunk_jobs.phases, world_size, name, options):
        close(found, trunk_jobs.phases_by_torch())


@pytest.mark.parametrize("kind", ["model", "trunk"])
def test_groups_merge_the_parameters_of_each_optimizer(replicas: Replicas, kind: str) -> None:
    outer = {"lr": 0.7, "momentum": 0.9}
    for found in replicas(trunk_jobs.apart, 2, kind, outer):
        close(found, trunk_jobs.apart_by_torch(kind, outer))


def test_a_model_that_a_pipeline_has_divided_is_refused_by_name(replicas: Replicas) -> None:
    with pytest.raises(ReplicaError, match="a Sequential that an earlier Trainer has divided"):
        replicas(trunk_jobs.phases, 2, "pipeline", {})


def test_a_refused_trainer_in_a_pipeline_is_nothing_to_the_next(replicas: Replicas) -> None:
    for refusal, outcome in replicas(trunk_jobs.refused_before, 2):
        assert "other parameters in the model than those" in refusal
        assert outcome == "trained"
