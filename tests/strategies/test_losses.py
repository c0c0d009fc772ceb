"""Losses as people write them give the numbers of a plain loop of torch, however they are cut."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.replicas import Replicas
from tests.strategies import loss_jobs as jobs
from tests.strategies.loss_jobs import BY_ROWS, COUNTED, DOUBTFUL, NAMES, SUMS

EXACT = 1e-12

HALVES = pytest.mark.parametrize(
    "half", [0, pytest.param(1, marks=(pytest.mark.slow, pytest.mark.night))]
)
"""Every other loss; `test_fit_is_that_of_one_device` has all of them."""

SOME = ["ignored", "classifier", "weighted", "masked", "by_hand", "sum_by_rows", "each"]
OTHERS = [
    ("sharded", 2, {}),
    ("parameter_server", 2, {"max_staleness": 0, "servers": {"min_shard_bytes": 16}}),
    ("pipeline", 2, {"stages": 2, "microbatches": 2, "split": ["2"]}),
    ("mesh", 4, {"mesh": {"data": 2, "model": 2}}),
    ("local_sgd", 2, {"groups": 1, "every": 1, "outer": {"lr": 1.0, "momentum": 0.0}}),
    ("multi_worker_mirrored", 2, {"communication": "ddp"}),
]


@cache
def of_torch(loss: str, **options: Any) -> dict[str, Any]:
    """What all replicas of all tests are compared with."""
    return jobs.of_torch(dict(jobs.cases())[loss], **options)


def same(found: dict[str, Any], loss: str, **options: Any) -> None:
    expected = of_torch(loss, **options)
    for name, value in expected["weights"].items():
        difference = (found["weights"][name] - value).abs().max().item()
        assert difference < (1e-7 if loss == "scaled" else EXACT), (loss, name, difference)
    if "loss" in found and loss not in SUMS:
        assert found["loss"] == pytest.approx(
            expected["loss"], abs=1e-6 if loss == "scaled" else EXACT
        ), loss


def test_fit_is_that_of_one_device(replicas: Replicas) -> None:
    for result in replicas(jobs.fit, 2, "mirrored", {}, NAMES):
        for loss in NAMES:
            same(result[loss], loss)


@HALVES
def test_updates_of_several_batches(replicas: Replicas, half: int) -> None:
    names = [*COUNTED, "mse", "sum_by_rows"][half::2]
    for result in replicas(jobs.fit, 2, "mirrored", {}, names, 2):
        for loss in names:
            same(result[loss], loss, accumulate=2)


@HALVES
@pytest.mark.parametrize("penalized", [False, True])
def test_a_loop_of_ones_own(replicas: Replicas, penalized: bool, half: int) -> None:
    names = [*COUNTED, *BY_ROWS][1 - half :: 2] if penalized else NAMES[half::2]
    for result in replicas(jobs.loop, 2, "mirrored", {}, names, penalized):
        for loss in names:
            same(result[loss], loss, penalized=penalized)


@HALVES
def test_models_with_their_own_loss(replicas: Replicas, half: int) -> None:
    names = [name for name in NAMES if name != "each"][1 - half :: 2]
    for result in replicas(jobs.fit_own, 2, "mirrored", {}, names):
        for loss in names:
            same(result[loss], loss)


@pytest.mark.parametrize(("name", "count", "options"), OTHERS, ids=lambda value: str(value)[:20])
def test_other_strategies(
    replicas: Replicas, name: str, count: int, options: dict[str, Any]
) -> None:
    if name == "parameter_server":  # servers serve one training
        for loss in ("ignored", "masked", "by_hand"):
            for result in replicas(jobs.fit, count, name, options, [loss], servers=1):
                same(result[loss], loss)
        return
    for result in replicas(jobs.fit, count, name, options, SOME):
        for loss in SOME:
            same(result[loss], loss)


@pytest.mark.parametrize("how", ["function", "loop", "model"])
@pytest.mark.parametrize("loss", DOUBTFUL)
def test_what_no_parts_make_is_refused(replicas: Replicas, loss: str, how: str) -> None:
    said = replicas(jobs.refusals, 2, "mirrored", how, loss)
    assert any(each.startswith("a loss ") and "Return (sum, count)" in each for each in said), said


@pytest.mark.parametrize("loss", DOUBTFUL)
def test_one_device_refuses_no_loss(replicas: Replicas, loss: str) -> None:
    assert replicas(jobs.refusals, 1, "one_device", "loop", loss) == ["nothing was said"]


@pytest.mark.parametrize("how", ["step", "fit"])
def test_what_a_good_loss_has_told_is_not_about_the_next(replicas: Replicas, how: str) -> None:
    said = replicas(jobs.after_a_good_loss, 2, how)
    assert any(each.startswith("a loss made by Opaque") for each in said), said


def test_each_training_is_told_of_its_loss(replicas: Replicas) -> None:
    for job in (jobs.two_trainings, jobs.two_loops):
        for of_each in replicas(job, 2, "contrastive"):
            assert [len(said) for said in of_each] == [1, 1]


PADDED = [
    ("mirrored", 2, {}),
    ("sharded", 2, {}),
    ("mesh", 2, {"mesh": {"data": 2}}),
    ("local_sgd", 2, {"every": 1}),
    ("pipeline", 1, {"stages": 1, "microbatches": 1}),
    ("pipeline", 2, {"stages": 1, "microbatches": 4}),
    ("pipeline", 2, {"stages": 2, "microbatches": 2, "split": ["second"]}),
    ("pipeline", 4, {"stages": 2, "microbatches": 2, "split": ["second"]}),
]


@pytest.mark.parametrize(("name", "count", "options"), PADDED, ids=lambda value: str(value)[:40])
def test_an_evaluation_of_a_models_own_loss_counts_what_each_batch_leaves(
    replicas: Replicas, name: str, count: int, options: dict[str, Any]
) -> None:
    model = jobs.Padded().double()
    expected = [model(x, mask)["loss"].item() for x, mask in jobs.padded()]
    for found in replicas(jobs.evaluate_padded, count, name, options):
        assert found == pytest.approx(expected, abs=EXACT)


def test_replicas_that_meet_in_forward_passes_look_together(replicas: Replicas) -> None:
    """Also where the graph of one alone does not tell what its loss is divided by."""
    expected, _ = replicas(jobs.evaluate_third, 2, "mirrored", {})
    for way in ("sockets", "fsdp"):
        options = {"zero": 3, "communication": way}
        for found in replicas(jobs.evaluate_third, 2, "sharded", options):
            assert found == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("name", ["mirrored", "pipeline"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_loss_of_which_nothing_tells_its_divisor_is_no_figure(
    replicas: Replicas, name: str, deterministic: bool
) -> None:
    options = {"stages": 1} if name == "pipeline" else {}
    of_all = replicas(jobs.evaluate_detached, 2, name, options, deterministic)
    said = [line for lines in of_all for line in lines if line.startswith("a loss of the model's")]
    assert bool(said) if deterministic else len(said) == 2
