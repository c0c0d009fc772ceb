"""``optimizer.step()`` outside of `Strategy.update`: the update of all replicas, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import spartito as sp
from spartito.engine.updates import fused_update
from tests.replicas import Replicas
from tests.strategies import stepping_jobs as jobs

STRATEGIES: list[tuple[str, dict[str, Any], int]] = [
    ("one_device", {}, 1),
    ("mirrored", {}, 2),
    ("mirrored", {"communication": "process_group"}, 2),
    ("multi_worker_mirrored", {"communication": "sockets"}, 3),
    ("central_storage", {}, 2),
    ("sharded", {}, 2),
    ("local_sgd", {"groups": 1}, 2),
    ("mesh", {"mesh": {"data": 2}}, 2),
]
every_strategy = pytest.mark.parametrize(
    "given", STRATEGIES, ids=lambda given: "-".join([given[0], *map(str, given[1].values())])
)
Given = tuple[str, dict[str, Any], int]


@every_strategy
@pytest.mark.parametrize("kind", jobs.OPTIMIZERS)
def test_a_step_after_backward_is_the_update_of_all(
    replicas: Replicas, given: Given, kind: str
) -> None:
    name, options, count = given
    expected = jobs.by_torch(kind)
    for found in replicas(jobs.by_hand, count, name, options, kind):
        for value, right in zip(found, expected, strict=True):
            torch.testing.assert_close(value, right, rtol=0, atol=1e-12)


def test_a_schedule_made_before_and_several_backward_passes(replicas: Replicas) -> None:
    expected = jobs.by_torch("adamw", every=2)
    for found in replicas(jobs.by_hand, 2, "mirrored", {}, "adamw", schedule_first=True, every=2):
        for value, right in zip(found, expected, strict=True):
            torch.testing.assert_close(value, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", ["step", "update"])
@pytest.mark.parametrize("given", [each for each in STRATEGIES if each[2] > 1], ids=str)
def test_gradients_of_each_replica_alone_are_refused(
    replicas: Replicas, given: Given, how: str
) -> None:
    name, options, count = given
    for refused in replicas(jobs.apart, count, name, how, options):
        assert "without strategy.backward()" in refused
        assert "Write strategy.backward(loss, batch) in place of loss.backward()." in refused


def test_on_one_device_it_is_torchs_own_step() -> None:
    net, optimizer, x, y = jobs.made("adamw")
    twin, plain, *_ = jobs.made("adamw")
    with sp.OneDeviceStrategy() as strategy:
        strategy.prepare(net, optimizer)
        for model, chosen in (net, optimizer), (twin, plain):
            F.cross_entropy(model(x), y).backward()
            chosen.step()
            F.cross_entropy(model(x), y).backward()
            assert chosen.step(lambda: 2.0) == 2
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            # Not to the last bit: products may depend on where in memory a tensor lies.
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        strategy.backward(F.cross_entropy(net(x), y, reduction="none"), batch_of(x))
        with pytest.raises(sp.UserError, match="closure"):
            optimizer.step(lambda: 2.0)


def batch_of(x: torch.Tensor) -> Any:
    return next(iter(sp.OneDeviceStrategy().distribute(sp.data.arrays(x).batch(len(x)))))


def test_a_prepared_optimizer_is_still_torchs_in_one_pass() -> None:
    _, optimizer, *_ = jobs.made("adamw")
    net, *_ = jobs.made("adamw")
    optimizer = torch.optim.AdamW(net.parameters())
    with sp.OneDeviceStrategy() as strategy:
        strategy.prepare(net, optimizer)
        assert fused_update.kernel_of(optimizer) is not None
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert fused_update.kernel_of(optimizer) is not None
        optimizer.__dict__["step"] = print
        assert fused_update.kernel_of(optimizer) is None
    assert "step" not in copy.deepcopy(optimizer).__dict__


@pytest.mark.parametrize(("changes", "said"), [(False, ""), (True, "drifted apart")])
def test_close_compares_replicas_after_a_loop(replicas: Replicas, changes: bool, said: str) -> None:
    for found in replicas(jobs.another_optimizer, 2, changes):
        assert said in found
        assert bool(found) == changes
    if changes:
        for found in replicas(jobs.another_optimizer, 2, changes, fails=True):
            assert found == "the script's own"


def test_a_closed_strategy_leaves_the_optimizer_alone(replicas: Replicas) -> None:
    assert replicas(jobs.afterwards, 2) == [True, True]


@pytest.mark.parametrize("how", ["step", "update"])
def test_a_worker_of_servers_does_not_step_alone(replicas: Replicas, how: str) -> None:
    found = replicas(jobs.apart, 2, "parameter_server", how, {}, servers=1)
    assert any(found)  # a quick worker may take all of the work
    assert all("without strategy.backward()" in refused for refused in found if refused)
