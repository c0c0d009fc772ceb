"""Batches that a collate function makes in its own way train as in a loop by hand."""

from __future__ import annotations

import pytest

from tests.replicas import ReplicaError, Replicas
from tests.strategies import data_jobs
from tests.strategies.test_contracts import Case, close, each_of, run

CASES: list[Case] = [
    ("one_device", 1, {}),
    ("mirrored", 2, {}),
    ("sharded", 2, {"zero": 3, "block_bytes": 100}),
]


@each_of(CASES)
def test_numbers_are_those_of_torch(replicas: Replicas, case: Case) -> None:
    close(run(replicas, case, data_jobs.own_forms), data_jobs.own_forms_by_torch())


def test_what_is_drawn_for_rows_that_nobody_knows_is_refused(replicas: Replicas) -> None:
    replicas(data_jobs.left_out_with_dropout, 1, "one_device", {})
    with pytest.raises(ReplicaError, match="left out 1 of 4 examples: there is no prediction"):
        replicas(data_jobs.left_out_with_dropout, 1, "one_device", {}, predicts=True)
    with pytest.raises(ReplicaError, match="a collate function left out examples, and does not"):
        replicas(data_jobs.left_out_with_dropout, 2, "mirrored", {})


def test_a_pipeline_cuts_no_time_into_microbatches(replicas: Replicas) -> None:
    options = {"microbatches": 2}
    with pytest.raises(ReplicaError, match=r"cannot be cut into microbatches: .* have 3, 4 rows"):
        replicas(data_jobs.time_first_in_stages, 2, "pipeline", options)
    first, second = replicas(data_jobs.time_first_in_stages, 2, "pipeline", {"microbatches": 1})
    assert first == second
