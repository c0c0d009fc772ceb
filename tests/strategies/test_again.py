"""A model that was trained before gets the numbers that it would have got without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replicas import Replicas
from tests.strategies import again_jobs as jobs
from tests.strategies.test_contracts import close

FEW = [
    ("mirrored", 2, {}),
    ("multi_worker_mirrored", 2, {"communication": "sockets"}),
    ("sharded", 2, {"zero": 2, "block_bytes": 50}),
    ("mesh", 2, {"model": 1}),
]
ON_MESHES = [*FEW, ("mesh", 4, {"mesh": {"data": 2, "model": 2}})]
Case = tuple[str, int, dict[str, Any]]


@pytest.mark.parametrize("case", ON_MESHES, ids=str)
def test_norms_are_those_of_the_training_that_runs(replicas: Replicas, case: Case) -> None:
    name, size, options = case
    exact, apart = jobs.loss_of_parts(1), jobs.loss_of_parts(2)
    assert abs(exact - apart) > 1e-3
    for found in replicas(jobs.in_turn, size, name, options):
        assert found == pytest.approx([exact, apart] * 2, abs=1e-12)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_what_is_computed_again_draws_as_before(replicas: Replicas, case: Case) -> None:
    name, size, options = case
    for found in replicas(jobs.drawn_again, size, name, options):
        for loss, gradient in found:
            assert loss == pytest.approx(gradient, abs=1e-9)


def test_a_loop_is_not_exact_since_another_was(replicas: Replicas) -> None:
    alone, after = (replicas(jobs.by_hand, 2, "mirrored", {}, first) for first in (False, True))
    assert alone == after


@pytest.mark.parametrize("loop", ["fit", "by hand"])
@pytest.mark.parametrize("case", ON_MESHES, ids=str)
def test_a_norm_without_parameters_may_come_later(
    replicas: Replicas, case: Case, loop: str
) -> None:
    name, size, options = case
    wanted = jobs.norm_put_in_by_torch()
    for found in replicas(jobs.norm_put_in, size, name, options, loop):
        close(found, wanted)


@pytest.mark.parametrize("case", FEW[1:3], ids=str)
def test_batches_of_two_strategies_come_in_turns(replicas: Replicas, case: Case) -> None:
    name, size, options = case
    ((expected,),) = replicas(jobs.in_turns, 1, "one_device", {}, None)
    for beside in (False, True):
        (_, other), *_ = replicas(jobs.in_turns, 1, "one_device", {}, beside)
        for first, second in replicas(jobs.in_turns, size, name, options, beside):
            assert first == pytest.approx(expected, abs=1e-12)
            assert second == pytest.approx(other, abs=1e-12) or not beside


@pytest.mark.parametrize("loop", ["fit", "by hand"])
def test_a_norm_that_comes_later_sees_the_rows_of_a_group(replicas: Replicas, loop: str) -> None:
    wanted = jobs.norm_put_in_by_torch(tracks=False)
    case = ("parameter_server", {"groups": 1, "max_staleness": 0}, loop)
    for found in replicas(jobs.norm_put_in, 2, *case, tracks=False, exact=False, servers=1):
        close(found, wanted)
    (said, _) = replicas(jobs.norm_put_in, 2, *case, tracks=False, servers=1)
    assert "deterministic training of a model with BatchNorm under parameter_server" in said


@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_line_may_draw_something_else_later(replicas: Replicas, case: Case) -> None:
    name, size, options = case
    (wanted,) = replicas(jobs.draws_something_else, 1, "one_device", {})
    for found in replicas(jobs.draws_something_else, size, name, options):
        assert found == pytest.approx(wanted, abs=1e-12)


def test_a_norm_in_pipelines_is_exact_or_refused(replicas: Replicas) -> None:
    for found in replicas(jobs.in_pipelines, 2, 2):
        assert found == pytest.approx(jobs.loss_of_parts(1), abs=1e-12)
    for found in replicas(jobs.in_pipelines, 2, 1):
        assert "with the norm '1': it sees one of 2 data shards" in found
