"""Batches with fewer rows than replicas train as on one device."""

from __future__ import annotations

import pytest
import torch

from tests.replicas import ReplicaError, Replicas
from tests.strategies import small_jobs as jobs
from tests.strategies.test_contracts import (
    CASES,
    LOOPS,
    Case,
    agree,
    close,
    crossed,
    each_of,
    run,
    servers,
)  # fmt: skip

THREE: Case = ("mirrored", 3, {})
SERVERS: Case = ("parameter_server", 3, {})


@crossed(  # a pipeline's BatchNorm sees microbatches, and it refuses spectral norm: see below
    "given",
    {
        "two": ("view", 26, 6),  # the last batch has two rows: on three replicas one trains
        "some": ("view", 18, 4),  # two rows, and whole batches of which one of three gets two
        "one": ("spectral", 25, 6),  # one row
        "own": ("own norms", 26, 6),  # subclasses with forward passes of their own
    },
    LOOPS,
)
def test_numbers_are_those_of_torch(
    replicas: Replicas, case: Case, given: tuple[str, int, int]
) -> None:
    options = dict(zip(("kind", "examples", "batch"), given, strict=True))
    found = run(replicas, case, jobs.by_trainer, **options)
    agree(case, found, jobs.by_torch(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("examples", "batch"), [(26, 6), (18, 4)])
def test_a_pipelines_are_those_of_microbatches(
    replicas: Replicas, examples: int, batch: int
) -> None:
    options = {"kind": "view", "examples": examples, "batch": batch}
    case: Case = ("pipeline", 2, {"microbatches": 3})
    with pytest.raises(ReplicaError, match="with the norm 'norm': it sees one of 3 microbatches"):
        run(replicas, case, jobs.by_trainer, **options)
    found = run(replicas, case, jobs.by_trainer, **options, deterministic=False)
    close(found, jobs.by_torch(**options, rows=2))  # type: ignore[arg-type]


def test_a_pipeline_refuses_what_each_microbatch_would_change(replicas: Replicas) -> None:
    case: Case = ("pipeline", 2, {"microbatches": 3})
    with pytest.raises(ReplicaError, match=r"normalize\(\) writes into its buffer .*_u'"):
        run(replicas, case, jobs.by_trainer, kind="spectral", examples=25, batch=6)
    with pytest.raises(ReplicaError, match=r"sets the buffer '1\.seen' to a tensor"):
        run(replicas, case, jobs.by_trainer, kind="sets a buffer", examples=25, batch=6)


def test_what_a_model_asks_of_all_replicas_leaves_spare_rows_out(replicas: Replicas) -> None:
    """Nor does a trial pass ask those that make none."""
    (right,) = replicas(jobs.asking, 1, "one_device")
    for found in replicas(jobs.asking, 3, "mirrored"):
        assert found == pytest.approx(right, rel=0, abs=1e-12)


def test_data_sets_of_torch_bring_spare_rows_too(replicas: Replicas) -> None:
    options = {"kind": "view", "examples": 26, "batch": 6}
    found = run(replicas, THREE, jobs.by_trainer, stream=True, **options)
    close(found, jobs.by_torch(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [CASES[1], THREE, SERVERS], ids=str)
@pytest.mark.parametrize(("examples", "batch"), [(21, 6), (12, 3), (20, 6)])
def test_no_replica_gets_one_row_to_normalize_over(
    replicas: Replicas, case: Case, examples: int, batch: int
) -> None:
    """Without synchronization each replica has its own BatchNorm, which refuses one value."""
    name, world_size, chosen = case
    results = replicas(
        jobs.by_trainer, world_size, name, chosen, servers=servers(case),
        deterministic=False, kind="one value per channel", examples=examples, batch=batch,
    )  # fmt: skip
    for result in results:
        assert all(bool(torch.isfinite(value).all()) for value in result.values())


@pytest.mark.parametrize("case", [CASES[0], CASES[1], THREE], ids=str)
def test_one_row_in_all_is_refused_as_on_one_device(replicas: Replicas, case: Case) -> None:
    with pytest.raises(ReplicaError, match="Expected more than 1 value per channel"):
        run(replicas, case, jobs.by_trainer, kind="view", examples=13, batch=6)


@each_of(CASES)
def test_evaluations_and_predictions_may_have_fewer_rows_than_replicas(
    replicas: Replicas, case: Case
) -> None:
    found = run(replicas, case, jobs.by_single_rows, kind="view")
    expected = jobs.single_rows_by_torch("view")
    close({name: found[name] for name in expected}, expected)
