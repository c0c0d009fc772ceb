"""Buffers that forward passes change do not drift apart in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.replicas import Replicas
from tests.strategies import buffer_jobs as jobs

Given = tuple[str, int, dict[str, Any]]
STRATEGIES: list[Given] = [
    ("mirrored", 2, {}),
    ("multi_worker_mirrored", 3, {"communication": "sockets"}),
    ("central_storage", 2, {}),
    ("sharded", 2, {}),
    ("local_sgd", 4, {"groups": 2, "every": 2}),
    ("mesh", 4, {"mesh": {"data": 2, "model": 2}}),
]
every_strategy = pytest.mark.parametrize("given", STRATEGIES, ids=lambda given: given[0])
DIFFERED = "differed between replicas: forward passes change them"


def alike(results: list[dict[str, Any]]) -> bool:
    return all(
        torch.equal(value, results[0]["values"][name])
        for result in results
        for name, value in result["values"].items()
    )


@every_strategy
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("centre", "1.center"),
        ("unsaved", "1.center"),
        ("loss", "loss.center"),
    ],
)
def test_they_are_refused_by_name_where_deterministic(
    replicas: Replicas, given: Given, kind: str, name: str
) -> None:
    strategy, count, options = given
    for found in replicas(jobs.trained, count, strategy, options, kind, True):
        said = "\n".join(found["said"])
        assert "drifted apart" in said
        assert f"'{name}'" in said


@every_strategy
def test_a_norm_of_ones_own_is_refused_where_deterministic(
    replicas: Replicas, given: Given
) -> None:
    strategy, count, options = given
    for found in replicas(jobs.trained, count, strategy, options, "own norm", True):
        assert "the examples of a batch see each other in Sequential's" in "\n".join(found["said"])


@every_strategy
def test_else_all_take_the_chiefs_and_are_told_once(replicas: Replicas, given: Given) -> None:
    strategy, count, options = given
    results = replicas(jobs.trained, count, strategy, options, "centre", False)
    assert alike([{"values": {"center": one["values"]["1.center"]}} for one in results])
    (said,) = [line for line in results[0]["said"] if DIFFERED in line]
    assert said.startswith("the buffer '1.center' differed")
    if strategy != "mesh":  # there the first of each group of tasks speaks
        assert sum(DIFFERED in line for one in results for line in one["said"]) <= 2


@every_strategy
@pytest.mark.parametrize("kind", ["counter", "norm", "cumulative norm", "cache"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_alike_or_averaged_or_a_cache_is_nothing_to_tell(
    replicas: Replicas, given: Given, kind: str, deterministic: bool
) -> None:
    strategy, count, options = given
    results = replicas(  # the last batch has rows for one replica alone
        jobs.trained, count, strategy, options, kind, deterministic, examples=18
    )
    for found in results:
        assert [line for line in found["said"] if "buffer" in line] == []
        assert [line for line in found["said"] if "drifted" in line] == []
    if strategy not in ("mesh", "sharded"):  # there tasks have parts of the model
        assert alike(results)


@pytest.mark.parametrize(("kind", "name"), [("centre", "center"), ("own norm", "running_mean")])
def test_servers_refuse_them_where_deterministic(replicas: Replicas, kind: str, name: str) -> None:
    options = {"max_staleness": 0, "servers": {"min_shard_bytes": 16}}
    found = replicas(jobs.trained, 2, "parameter_server", options, kind, True, servers=1)
    said = "\n".join(line for one in found for line in one["said"])
    assert f"'1.{name}'" in said
    assert "Workers see their own rows and do not meet there" in said


@pytest.mark.parametrize("kind", ["counter", "cache"])
def test_servers_take_what_is_alike(replicas: Replicas, kind: str) -> None:
    options = {"max_staleness": 0, "servers": {"min_shard_bytes": 16}}
    for found in replicas(jobs.trained, 2, "parameter_server", options, kind, True, servers=1):
        assert [line for line in found["said"] if "buffer" in line] == []


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("norm", "the norm '1'"),
        ("counter", "the buffer '1.calls'"),
        ("loss", "the buffer 'center' of the loss CentredLoss"),
    ],
)
def test_microbatches_refuse_what_sees_whole_batches(
    replicas: Replicas, kind: str, what: str
) -> None:
    options = {"stages": 2, "microbatches": 2}
    for found in replicas(jobs.trained, 2, "pipeline", options, kind, True):
        assert f"deterministic training under pipeline with {what}" in found["said"][-1]
    for found in replicas(jobs.trained, 2, "pipeline", {**options, "microbatches": 1}, kind, True):
        assert [line for line in found["said"] if "under pipeline with" in line] == []


def test_a_loop_of_ones_own_is_refused_after_its_first_update(replicas: Replicas) -> None:
    for found in replicas(jobs.trained, 2, "mirrored", {}, "centre", True, loop=True):
        assert "'1.center'" in found["said"][-1]
        assert found["steps"] == 1
    found = replicas(jobs.trained, 2, "mirrored", {}, "centre", False, loop=True)[0]
    assert DIFFERED in found["said"][-1]  # by `close`
