"""Replicas of several machines: any placement gives the same results, and a loss its own name.

Here a machine is a text that its processes give; test_machines.py has real network namespaces.
"""

from __future__ import annotations

import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spartito.collectives.membership.placement import Placement
from tests.collectives import jobs, result_jobs
from tests.collectives.group import Group, running
from tests.commands import free_port, free_ports
from tests.skips import shares_memory

LONG = 60.0  # a limit that no passing test comes near
SHORT = 3.0  # one that a frozen task lets pass; all have met by then
hosts = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)


@given(hosts)
def test_every_rank_has_one_machine_and_one_leader(names: list[str]) -> None:
    placement = Placement.of(names)
    ranks = range(len(names))
    assert sorted(rank for members in placement.machines for rank in members) == list(ranks)
    assert placement.world_size == len(names)
    for rank in ranks:
        members = placement.members(rank)
        assert members == tuple(other for other in ranks if names[other] == names[rank])
        assert placement.machines[placement.machine_of(rank)] == members
        assert placement.leaders[placement.machine_of(rank)] == min(members)


@given(hosts)
def test_machines_are_in_the_order_of_their_leaders(names: list[str]) -> None:
    leaders = Placement.of(names).leaders
    assert leaders[0] == 0
    assert list(leaders) == sorted(leaders)


@given(hosts)
def test_layers_are_for_several_machines_with_several_on_some(names: list[str]) -> None:
    machines = len(set(names))
    assert Placement.of(names).is_layered == (machines > 1 and machines < len(names))


@given(hosts, st.permutations("abcd"))
def test_only_who_is_together_counts(names: list[str], letters: list[str]) -> None:
    renamed = [letters["abcd".index(name)] for name in names]
    assert Placement.of(renamed) == Placement.of(names)


@shares_memory
def test_leaders_tell_their_machine_that_they_get_on() -> None:
    port = free_port()
    with running() as group:
        for rank in range(3):
            group.start(rank, jobs.tells_its_machine, 3, port, "on aab")
        assert [group.result(rank) for rank in range(3)] == [True, False, True]


WAYS = [
    ("aab", "aba"),
    ("abab", "abbb"),
    pytest.param(("aabca",), marks=pytest.mark.slow, id="aabca"),
]


@pytest.mark.parametrize("ways", WAYS, ids=",".join)
def test_any_placement_gives_the_same_results(ways: tuple[str, ...]) -> None:
    world_size = len(ways[0])
    told = [(f"on {way}", port) for way, port in zip(ways, free_ports(len(ways)), strict=True)]
    with running() as group:
        for rank in range(world_size):
            group.start(rank, result_jobs.wrong_results, world_size, told)
        for rank in range(world_size):
            assert group.result(rank) == []


@pytest.mark.parametrize("letters", ["aab", "abab"])
def test_all_ranks_get_the_same_bits(letters: str) -> None:
    world_size, port = len(letters), free_port()
    with running() as group:
        for rank in range(world_size):
            group.start(rank, result_jobs.random_sums, world_size, port, f"on {letters}")
        (total, mean, parts), *others = [group.result(rank) for rank in range(world_size)]
        exact = torch.stack(parts).double().sum(0)
        torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(mean.double(), exact / 3 / world_size, rtol=1e-5, atol=1e-3)
        for other in others:
            assert torch.equal(other[0], total)
            assert torch.equal(other[1], mean)


@pytest.mark.parametrize(
    ("letters", "kind"),
    [
        pytest.param("aaa", "SharedMemoryCollective", marks=shares_memory),
        ("abc", "SocketCollective"),
        pytest.param("aab", "HierarchicalCollective", marks=shares_memory),
    ],
)
def test_the_machines_choose_the_collective(letters: str, kind: str) -> None:
    port = free_port()
    with running() as group:
        for rank in range(3):
            group.start(rank, jobs.kind_of_group, 3, port, f"on {letters}")
        assert [group.result(rank) for rank in range(3)] == [kind] * 3


@shares_memory
def test_each_machine_sends_once() -> None:
    """Leaders alone reduce between the machines: they send the gradients twice, others once."""
    port = free_port()
    with running() as group:
        for rank in range(4):
            group.start(rank, jobs.traffic_of_a_step, 4, port, "on aabb", 1000)
        sent = [group.result(rank) for rank in range(4)]
    inside = 4 * 1000
    assert sent[1] == sent[3] == inside
    assert sent[0] == sent[2] == inside * 2 + 8 * 2  # and two piggybacked scalars


def together(group: Group, letters: str, limit: float, by: str = "all_reduce") -> None:
    """Start a rank for each letter's machine, and return when all have met once."""
    port = free_port()
    for rank in range(len(letters)):
        group.start(rank, jobs.wait_for_others, len(letters), port, limit, f"on {letters}", by)
    for rank in range(len(letters)):
        assert group.result(rank) == "together"


@pytest.mark.parametrize("victim", range(4))
def test_a_killed_rank_is_named_by_all(victim: int) -> None:
    with running() as group:
        together(group, "aabb", LONG)
        others = [rank for rank in range(4) if rank != victim]
        for rank in others:
            group.tell(rank)
        group.signal(victim, signal.SIGKILL)
        for rank in others:
            kind, text, seconds = group.result(rank)
            assert kind == "TaskLostError"
            assert f"worker {victim} is gone" in text
            assert seconds < LONG / 2


@pytest.mark.parametrize(
    ("letters", "by"),
    [("abab", "reducer"), ("abcb", "broadcast"), ("abca", "all_gather"), ("aabb", "barrier")],
)
def test_no_placement_and_no_call_changes_who_is_named(letters: str, by: str) -> None:
    with running() as group:
        together(group, letters, LONG, by)
        for rank in range(3):
            group.tell(rank)
        group.signal(3, signal.SIGKILL)
        for rank in range(3):
            kind, text, _ = group.result(rank)
            assert kind == "TaskLostError"
            assert "worker 3 is gone" in text


def test_who_comes_after_the_loss_hears_the_right_name() -> None:
    """The leader of the victim's machine has left when the other machine comes."""
    with running() as group:
        together(group, "aabb", LONG)
        group.signal(3, signal.SIGKILL)
        group.tell(2)
        results = [group.result(2)]
        for rank in (0, 1):
            group.tell(rank)
        results += [group.result(rank) for rank in (0, 1)]
        for kind, text, _ in results:
            assert kind == "TaskLostError"
            assert "worker 3 is gone" in text


def test_the_keeper_of_the_store_stays_until_the_leaders_have_heard() -> None:
    with running() as group:
        together(group, "aabb", LONG)
        group.signal(1, signal.SIGKILL)
        group.tell(0)
        assert group.stays(0, 1.0)
        for rank in (2, 3):
            group.tell(rank)
        for rank in (0, 2, 3):
            kind, text, _ = group.result(rank)
            assert kind == "TaskLostError"
            assert "worker 1 is gone" in text


@pytest.mark.parametrize(
    "victim", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]
)
def test_a_frozen_rank_is_named_by_all(victim: int) -> None:
    with running() as group:
        together(group, "aabb", SHORT)
        group.signal(victim, signal.SIGSTOP)
        others = [rank for rank in range(4) if rank != victim]
        for rank in others:
            group.tell(rank)
        waited = []
        for rank in others:
            kind, text, seconds = group.result(rank)
            assert kind == "TaskLostError"
            assert f"worker {victim}" in text
            assert "within 3 s" in text or "keeps the store" in text
            waited.append(seconds)
        assert max(waited) >= SHORT  # who wakes up late may hear from who waited
        group.signal(victim, signal.SIGCONT)


@shares_memory
def test_a_rank_that_is_frozen_before_it_has_the_result_is_named_by_all() -> None:
    """The other machine has its result, goes on, and waits for this one's leader meanwhile."""
    port = free_port()
    with running() as group:
        for rank in range(4):
            group.start(rank, jobs.freeze_halfway, 4, port, SHORT, "on aabb")
        for rank in range(4):
            assert group.result(rank) == "together"
        for rank in range(4):
            group.tell(rank)
        for rank in range(3):
            kind, text = group.result(rank)
            assert kind == "TaskLostError"
            assert "worker 3 did not come within 3 s; its process lives" in text
        group.signal(3, signal.SIGCONT)


def test_a_leader_that_does_not_come_is_named_to_a_machine_that_waits_for_its_own() -> None:
    """Worker 1 waits longer for the result than worker 0 does for worker 2."""
    with running() as group:
        together(group, "aab", SHORT)
        group.tell(0)
        group.tell(1)  # both wait for worker 2, which is not told
        for rank in range(2):
            kind, text, _ = group.result(rank)
            assert kind == "TaskLostError"
            assert "worker 2 did not come within 3 s" in text


def test_all_come_after_a_pause() -> None:
    with running() as group:
        together(group, "aabb", LONG)
        group.signal(3, signal.SIGSTOP)
        for rank in range(4):
            group.tell(rank)
        group.signal(3, signal.SIGCONT)
        assert [group.result(rank) for rank in range(4)] == ["met"] * 4


def test_a_machine_hears_that_its_leader_did_not_find_the_others() -> None:
    port = free_port()
    with running() as group:
        for rank in range(2):
            group.start(rank, jobs.leaders_do_not_meet, 2, port)
        for rank in range(2):
            assert group.result(rank) == ("TaskLostError", "worker 9 did not come\n  Start it.")
