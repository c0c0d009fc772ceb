"""Numbers are torch's when parameters change, and when batches are accumulated."""

from __future__ import annotations

import re
from typing import Any

import pytest

from spartito.errors import TaskLostError, UserError
from tests.replicas import ReplicaError, Replicas
from tests.strategies import changing_jobs as jobs
from tests.strategies.test_contracts import (
    CASES,
    LOOPS,
    SYNCHRONOUS,
    Case,
    agree,
    close,
    crossed,
    every_loop,
    named,
    run,
)

SERVER = next(case for case in CASES if case[0] == "parameter_server")
every_pipeline = pytest.mark.parametrize(
    "case", [case for case in CASES if case[0] == "pipeline"], ids=named
)
"""They follow no change of what they have divided."""
SIZES = [(129, 64, 2, 6, 3), (17, 8, 3, 4, 3), (5, 4, 2, 3, 2)]
IN_TIME = ["add a group", "unfreeze", "take out"]
"""Changes that may come between a batch and its backward pass: no new values are needed."""


@crossed("change", {change: change for change in jobs.CHANGES}, LOOPS)
def test_parameters_that_change_between_two_fits(
    replicas: Replicas, case: Case, change: str
) -> None:
    agree(case, run(replicas, case, jobs.by_trainer, change=change), jobs.by_torch(change))


@every_pipeline
def test_a_pipeline_follows_what_is_unfrozen(replicas: Replicas, case: Case) -> None:
    close(run(replicas, case, jobs.by_trainer, change="unfreeze"), jobs.by_torch("unfreeze"))


@every_pipeline
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("begin with none", "in the optimizer .* divided: body.0.bias, body.0.weight"),
        ("add a group", "in the optimizer .* divided: body.0.bias, body.0.weight"),
        ("replace", "in the model .* divided: head.bias, head.weight"),
        ("take out", "in the optimizer .* divided: body.0.bias, body.0.weight, head.bias"),
    ],
)
def test_pipelines_refuse_other_parameters(
    replicas: Replicas, case: Case, change: str, text: str
) -> None:
    name, world_size, options = case
    errors = replicas(jobs.refusal, world_size, name, options, change)
    refused = [error for error in errors if isinstance(error, UserError)]
    assert refused
    assert all(re.match(f"other parameters {text}", str(error)) for error in refused)
    # Where nothing went of one's own the others are waited for, and are gone.
    assert all(isinstance(error, UserError | TaskLostError) for error in errors)


@crossed("change", {change: change for change in IN_TIME}, LOOPS)
def test_parameters_that_change_in_a_loop(replicas: Replicas, case: Case, change: str) -> None:
    agree(case, run(replicas, case, jobs.by_hand, change=change), jobs.by_torch(change))


def test_new_parameters_after_a_batch_was_taken_are_refused(replicas: Replicas) -> None:
    with pytest.raises(ReplicaError, match="2 parameters were put into the model after this batch"):
        replicas(jobs.by_hand, 2, "mirrored", {}, change="replace")


@pytest.mark.parametrize("change", jobs.CHANGES)
def test_servers_refuse_other_parameters(replicas: Replicas, change: str) -> None:
    with pytest.raises(ReplicaError, match="parameters changed"):
        run(replicas, SERVER, jobs.by_trainer, change=change)


@crossed("sizes", {str(n): n for n in SIZES}, SYNCHRONOUS)
def test_accumulation_over_shares_that_are_empty(
    replicas: Replicas, case: Case, sizes: tuple[int, ...]
) -> None:
    names = ("examples", "batch", "accumulate", "steps", "epochs")
    options: dict[str, Any] = dict(zip(names, sizes, strict=True))
    found = run(replicas, case, jobs.accumulated, **options)
    agree(case, found, jobs.accumulated_by_torch(**options))


@every_loop
def test_several_backward_passes_add_up_as_in_torch(replicas: Replicas, case: Case) -> None:
    agree(case, run(replicas, case, jobs.twice), jobs.twice_by_torch())


@pytest.mark.parametrize("name", ["mirrored", "sharded", "central_storage"])
def test_what_the_model_has_no_more_is_refused(replicas: Replicas, name: str) -> None:
    expected = "UserError: 4 of the optimizer's parameters are not the model's"
    for said in replicas(jobs.with_another_layer, 2, name, {}):
        assert [each.partition(",")[0] for each in said] == [expected] * 3


def test_a_whole_weight_in_place_of_a_shard_is_refused(replicas: Replicas) -> None:
    for said in replicas(jobs.with_a_whole_weight, 2):
        assert said.startswith("UserError: 2.weight is a new parameter, of shape (3, 4), in place")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mirrored", {}),
        ("mirrored", {"communication": "ddp"}),
        ("multi_worker_mirrored", {"communication": "sockets", "bucket_bytes": 8}),
        ("central_storage", {}),
    ],
    ids=str,
)
def test_sparse_gradients_that_come_late_are_refused(
    replicas: Replicas, name: str, options: dict[str, Any]
) -> None:
    for said in replicas(jobs.sparse_later, 2, name, options):  # also who waited for the other
        assert said.startswith("UserError: a sparse gradient of shape (5, 3)")
