"""Gradients that change between backward and update: as in plain torch, or not without a word."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import spartito as sp
from tests.replicas import Replicas
from tests.strategies import edit_jobs as jobs

STRATEGIES: list[tuple[str, dict[str, Any], int]] = [
    ("mirrored", {}, 2),
    ("mirrored", {"communication": "process_group"}, 2),
    ("mirrored", {"communication": "ddp"}, 2),
    ("multi_worker_mirrored", {"communication": "sockets", "bucket_bytes": 64}, 3),
    ("central_storage", {}, 2),
    ("sharded", {}, 2),
    ("sharded", {"zero": 2}, 2),
    ("local_sgd", {"groups": 1}, 2),
    ("mesh", {"mesh": {"data": 2}}, 2),
]
every_strategy = pytest.mark.parametrize(
    "given", STRATEGIES, ids=lambda given: "-".join([given[0], *map(str, given[1].values())])
)
Given = tuple[str, dict[str, Any], int]
BOTH = [("mirrored", {}, 2), ("multi_worker_mirrored", {"communication": "sockets"}, 3)]


@every_strategy
@pytest.mark.parametrize("change", ["penalty", "sign_", "noise", "data"])
def test_deterministic_training_refuses_changes(
    replicas: Replicas, given: Given, change: str
) -> None:
    name, options, count = given
    for _, said in replicas(jobs.loop, count, name, options, change, "after", deterministic=True):
        (text,) = said
        assert "was changed beside strategy.backward()" in text
        assert ("'unused'" if change == "penalty" else "'0.weight'") in text
        assert "register_step_pre_hook" in text


@pytest.mark.parametrize("change", [*jobs.CHANGES])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_change_is_told_once(replicas: Replicas, change: str, deterministic: bool) -> None:
    for parameters, said in replicas(
        jobs.loop, 2, "mirrored", {}, change, "after", deterministic=deterministic
    ):
        (text,) = said
        assert bool(parameters) != deterministic
        assert "beside strategy.backward(), by another backward() or by hand" in text


def test_a_change_that_begins_late_is_told(replicas: Replicas) -> None:
    for said in replicas(jobs.late, 2, 8):
        (text,) = said
        assert "beside strategy.backward(), by another backward() or by hand" in text


def test_each_training_is_told(replicas: Replicas) -> None:
    for of_each in replicas(jobs.two_trainings, 2):
        assert [len(said) for said in of_each] == [1, 1]


@pytest.mark.parametrize("given", BOTH, ids=lambda given: given[0])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_pass_before_is_told_too(replicas: Replicas, given: Given, deterministic: bool) -> None:
    name, options, count = given
    for _, said in replicas(jobs.loop, count, name, options, "penalty", "before", deterministic):
        (text,) = said
        assert "beside strategy.backward(), by another backward() or by hand" in text


@pytest.mark.parametrize(
    ("given", "change"),
    [
        (given, change)
        for given in STRATEGIES
        for change in jobs.EXACT
        # All of a bucket of DDP have one version: which of them were written nobody knows.
        if (given[1].get("communication"), change) != ("ddp", "zeroed")
    ],
    ids=str,
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_exact_is_no_change(
    replicas: Replicas, given: Given, change: str, deterministic: bool
) -> None:
    name, options, count = given
    expected = jobs.by_torch(jobs.EXACT[change])
    for found, said in replicas(jobs.loop, count, name, options, change, "after", deterministic):
        assert not said
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("options", "told"), [({"max_staleness": 0}, True), ({}, False)])
def test_a_push_on_its_own_may_be_changed(
    replicas: Replicas, options: dict[str, Any], told: bool
) -> None:
    given = ("parameter_server", options, "sign_", "after")
    (found,) = replicas(jobs.loop, 1, *given, servers=1, deterministic=False)
    assert not found[1]  # one worker's are all there are
    texts = [said for _, said in replicas(jobs.loop, 2, *given, servers=1, timeout=60)]
    assert any(texts) == told


@pytest.mark.parametrize("change", ["sign_", "clamp_", "decay", "noise", "clip"])
@pytest.mark.parametrize(
    "given",
    [each for each in STRATEGIES if each[0] not in ("central_storage", "sharded")],
    ids=lambda given: "-".join([given[0], *map(str, given[1].values())]),
)
def test_a_hook_has_the_gradients_of_all_replicas(
    replicas: Replicas, given: Given, change: str
) -> None:
    name, options, count = given
    expected = jobs.by_torch(jobs.CHANGES[change])
    for found, said in replicas(jobs.loop, count, name, options, change, "hook", True):
        assert not said
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("edits_waiting", [False, True])
def test_gradients_that_wait_for_another_update(replicas: Replicas, edits_waiting: bool) -> None:
    for said in replicas(jobs.two_models, 2, edits_waiting):
        assert bool(said) == edits_waiting
        assert not said or "was changed beside strategy.backward()" in said


def test_what_steps_have_left_is_no_change(replicas: Replicas) -> None:
    expected = jobs.by_torch(jobs.read)
    for found in replicas(jobs.after_steps, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("every", [1, 2])
def test_a_scaler_of_ones_own_is_no_change(replicas: Replicas, every: int) -> None:
    expected = jobs.by_torch(jobs.read)
    for found in replicas(jobs.scaled, 2, every):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_scaler_hides_no_change(replicas: Replicas) -> None:
    for said in replicas(jobs.scaled_and_changed, 2):
        assert "was changed beside strategy.backward()" in said


@pytest.mark.parametrize("change", jobs.CHANGES)
@pytest.mark.parametrize("shares", [False, True])
def test_one_replica_changes_gradients_as_in_plain_torch(change: str, shares: bool) -> None:
    """Also those of a loss that weighs less than its batch has rows."""
    net, _, x, y = jobs.made()
    twin, mask = copy.deepcopy(net), (torch.arange(jobs.EXAMPLES) % 3 == 0).double()

    def losses(model: nn.Module, rows: slice) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="none") * mask[rows]

    plain = [torch.optim.SGD(twin.parameters(), 0.1)]
    with sp.OneDeviceStrategy(cluster=sp.ClusterSpec.alone()) as strategy:
        strategy.prepare(net, optimizer := torch.optim.SGD(net.parameters(), 0.1))
        if shares:  # nothing is divided twice for whoever else has a parameter
            strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        for batch in strategy.distribute(sp.data.arrays(x, y).batch(jobs.BATCH)):
            rows = slice(batch.step * jobs.BATCH, (batch.step + 1) * jobs.BATCH)
            strategy.backward((losses(net, rows).sum(), mask[rows].sum()), batch)
            jobs.CHANGES[change](net)
            strategy.update(optimizer)
            (losses(twin, rows).sum() / mask[rows].sum()).backward()
            jobs.CHANGES[change](twin)
            plain[0].step()
            plain[0].zero_grad()
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
