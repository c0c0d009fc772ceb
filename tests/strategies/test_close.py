"""What a closed strategy leaves: the numbers of plain torch, or an error that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.replicas import Replicas
from tests.skips import shares_memory
from tests.strategies import close_jobs as jobs
from tests.strategies.test_contracts import close

GATHERED = {"zero": 3, "communication": "sockets"}


@pytest.mark.parametrize(
    ("then", "options"),
    [("", {}), ("mirrored", {}), ("sharded", GATHERED), ("mesh", {"model": 2})],
)
def test_a_model_leaves_the_memory_of_central_storage(
    replicas: Replicas, then: str, options: jobs.Options
) -> None:
    """Else each replica's updates would be those of all."""
    expected = jobs.epochs("Adam", "Adam")
    for found in replicas(jobs.go_on, 2, "central_storage", {}, then, options, "Adam", "Adam"):
        close(found, expected)


@pytest.mark.parametrize("then", ["", "one_device", "mirrored"])
@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("central_storage", {}, "Adam"),
        ("central_storage", {}, "Adafactor"),
        ("sharded", {"zero": 1}, "momentum"),
        pytest.param("sharded", {"zero": 3}, "Adam", marks=shares_memory),
        ("mesh", {"mesh": {"data": 2}, "zero": 1}, "Adam"),
    ],
)
def test_a_part_of_an_optimizers_state_is_refused(
    replicas: Replicas, name: str, options: jobs.Options, kind: str, then: str
) -> None:
    for said in replicas(jobs.go_on, 2, name, options, then, {}, kind, ""):
        assert "whose state was divided among tasks by a strategy that is closed" in said
        assert "Make a new optimizer. To keep the state, save before close()" in said


@shares_memory  # else the parameters are in shards, too
@pytest.mark.parametrize(
    ("name", "options"), [("central_storage", {}), ("sharded", {}), ("sharded", {"zero": 3})]
)
def test_an_optimizer_without_state_goes_on(
    replicas: Replicas, name: str, options: jobs.Options
) -> None:
    for found in replicas(jobs.go_on, 2, name, options, "", {}, "SGD", ""):
        close(found, jobs.epochs("SGD", ""))


@shares_memory
def test_an_optimizer_that_was_not_used_goes_on(replicas: Replicas) -> None:
    net, optimizer = jobs.made("Adam")
    jobs.by_torch(net, optimizer)
    for found in replicas(jobs.never_begun, 2):
        close(found, jobs.values(net))


@shares_memory
@pytest.mark.parametrize("name", ["central_storage", "sharded"])
def test_a_strategy_that_is_gone_has_left_as_much(replicas: Replicas, name: str) -> None:
    for said in replicas(jobs.without_strategy, 2, name, "Adam"):
        assert "whose state was divided among tasks by a strategy that is closed" in said
    for found in replicas(jobs.without_strategy, 2, name, "SGD"):
        close(found, jobs.epochs("SGD", ""))


@pytest.mark.parametrize(
    ("then", "communication"),
    [("mirrored", "sockets"), ("mesh", "sockets"), ("one_device", "sockets"), ("sharded", "fsdp")],
)
def test_a_model_in_shards_is_refused(replicas: Replicas, then: str, communication: str) -> None:
    options = {"zero": 3, "communication": communication}
    for said in replicas(jobs.go_on, 2, "sharded", options, then, {}, "SGD", "SGD"):
        assert said.startswith("the values of body.0.weight are in shards of another strategy")
        assert "Build the model anew, and load what was saved" in said


def test_groups_leave_the_merged_model_and_no_optimizer(replicas: Replicas) -> None:
    first, second = replicas(jobs.groups_go_on, 2, "SGD")
    close(first, second)
    for said in replicas(jobs.groups_go_on, 2, "Adam"):
        assert "whose state was each group's own under a strategy that is closed" in said


def test_groups_that_nobody_closes_are_told_of(replicas: Replicas) -> None:
    assert [len(said) for said in replicas(jobs.groups_without_strategy, 2)] == [1, 0]


def test_an_optimizer_whose_steps_servers_made_is_refused(replicas: Replicas) -> None:
    given: tuple[Any, ...] = ("parameter_server", {}, "", {}, "Adam", "")
    for said in replicas(jobs.go_on, 2, *given, servers=1):
        assert "whose state was on servers under a strategy that is closed" in said


def test_close_once_more_changes_nothing(replicas: Replicas) -> None:
    net, optimizer = jobs.made("Adam")
    jobs.by_torch(net, optimizer)
    for found in replicas(jobs.closed_again, 2):
        close(found, jobs.values(net))


def test_close_ends_no_step_of_another_strategy(replicas: Replicas) -> None:
    net, optimizer = jobs.made(inner=nn.BatchNorm1d(8))
    jobs.by_torch(net, optimizer)
    for found in replicas(jobs.closed_beside, 2):
        close(found, jobs.values(net))


def test_backward_after_close_sends_nothing(replicas: Replicas) -> None:
    expected = jobs.another_head(None)
    for found, overlapped in replicas(jobs.another_head_after_buckets, 2):
        assert overlapped  # else this shows nothing
        close(found, expected)


@pytest.mark.parametrize(
    ("name", "options"), [("mirrored", {}), ("sharded", {"zero": 1}), ("central_storage", {})]
)
def test_what_waited_does_not_keep_torch_from_clipping(
    replicas: Replicas, name: str, options: jobs.Options
) -> None:
    net, _ = jobs.made()
    expected = jobs.clip_by_torch(net)
    for found in replicas(jobs.clip, 2, name, options):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
