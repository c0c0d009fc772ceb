"""Numbers are torch's when parameters change, and when batches are accumulated."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replicas import ReplicaError, Replicas
from tests.strategies import changing_jobs as jobs
from tests.strategies.test_contracts import CASES, Case, close, every_synchronous, run

SERVER = next(case for case in CASES if case[0] == "parameter_server")
IN_TIME = ["add a group", "unfreeze", "take out"]
"""Changes that may come between a batch and its backward pass: no new values are needed."""


@every_synchronous
@pytest.mark.parametrize("change", jobs.CHANGES)
def test_parameters_that_change_between_two_fits(
    replicas: Replicas, case: Case, change: str
) -> None:
    close(run(replicas, case, jobs.by_trainer, change=change), jobs.by_torch(change))


@every_synchronous
@pytest.mark.parametrize("change", IN_TIME)
def test_parameters_that_change_in_a_loop(replicas: Replicas, case: Case, change: str) -> None:
    close(run(replicas, case, jobs.by_hand, change=change), jobs.by_torch(change))


def test_new_parameters_after_a_batch_was_taken_are_refused(replicas: Replicas) -> None:
    with pytest.raises(ReplicaError, match="2 parameters were put into the model after this batch"):
        replicas(jobs.by_hand, 2, "mirrored", {}, change="replace")


@pytest.mark.parametrize("change", jobs.CHANGES)
def test_servers_refuse_other_parameters(replicas: Replicas, change: str) -> None:
    with pytest.raises(ReplicaError, match="parameters changed"):
        run(replicas, SERVER, jobs.by_trainer, change=change)


@every_synchronous
@pytest.mark.parametrize("sizes", [(129, 64, 2, 6, 3), (17, 8, 3, 4, 3), (5, 4, 2, 3, 2)])
def test_accumulation_over_shares_that_are_empty(
    replicas: Replicas, case: Case, sizes: tuple[int, ...]
) -> None:
    names = ("examples", "batch", "accumulate", "steps", "epochs")
    options: dict[str, Any] = dict(zip(names, sizes, strict=True))
    close(run(replicas, case, jobs.accumulated, **options), jobs.accumulated_by_torch(**options))


@every_synchronous
def test_several_backward_passes_add_up_as_in_torch(replicas: Replicas, case: Case) -> None:
    close(run(replicas, case, jobs.twice), jobs.twice_by_torch())
