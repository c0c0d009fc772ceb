from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.cluster import ClusterSpec, Task
from spartito.errors import UserError
from spartito.wire.addresses import is_loopback, split_address

TWO = ClusterSpec(
    addresses={"chief": ("a:1",), "worker": ("b:2", ""), "ps": ("c:3",)},
    task=Task("worker", 0),
    rank=1,
    world_size=3,
    local_rank=0,
    local_size=1,
    rendezvous="a:1",
    source="a test",
)


def test_alone_is_the_chief_of_one_replica() -> None:
    alone = ClusterSpec.alone()
    assert alone.is_chief
    assert (alone.rank, alone.world_size, alone.local_rank, alone.local_size) == (0, 1, 0, 1)
    assert alone.rendezvous is None
    assert str(alone.task) == "worker 0"


def test_the_chief_comes_first_in_rank_order_and_servers_have_no_rank() -> None:
    assert TWO.replica_tasks == (Task("chief", 0), Task("worker", 0), Task("worker", 1))
    assert not TWO.is_chief
    assert TWO.task_of(2) == Task("worker", 1)


def test_a_chief_computes_where_there_are_no_servers() -> None:
    assert TWO.num_computing == 2
    assert replace(TWO, addresses={**TWO.addresses, "ps": ()}).num_computing == 3
    assert ClusterSpec.alone().num_computing == 1


def test_whether_it_spans_hosts_is_told_by_addresses_or_local_ranks() -> None:
    assert TWO.spans_hosts
    here = replace(TWO, addresses={"chief": ("a:1",), "worker": ("a:2", "a:4"), "ps": ("a:3",)})
    assert not here.spans_hosts
    untold = replace(here, addresses={"chief": ("a:1",), "worker": ("", "")})
    assert untold.spans_hosts
    assert not replace(untold, local_rank=1, local_size=3).spans_hosts
    assert not ClusterSpec.alone().spans_hosts


def test_a_rank_is_named_with_its_address_where_it_is_known() -> None:
    assert TWO.name_of(1) == "worker 0 (b:2)"
    assert TWO.name_of(2) == "worker 1"


def test_it_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(TWO)) == TWO


def test_an_evaluator_apart_is_alone_and_nobodys_chief() -> None:
    job = replace(
        TWO,
        addresses={**TWO.addresses, "evaluator": ("d:4",)},
        task=Task("evaluator", 0),
        rank=-1,
        local_rank=-1,
        local_size=0,
    )
    own = job.apart()
    assert job.has_evaluator
    assert not TWO.has_evaluator
    assert own.task == job.task
    assert own.addresses == {"evaluator": ("d:4",)}
    assert (own.rank, own.world_size, own.local_rank, own.local_size) == (0, 1, 0, 1)
    assert own.replica_tasks == (job.task,)
    assert own.rendezvous is None
    assert not own.is_chief


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"rank": 0}, "does not belong"),
        ({"rank": 3}, "does not belong"),
        ({"world_size": 2}, "lists 3"),
        ({"task": Task("worker", 2)}, "not in the cluster"),
        ({"task": Task("evaluator", 0)}, "not in the cluster"),
        ({"local_rank": 1}, "local rank"),
        ({"local_size": 4}, "local rank"),
        ({"rendezvous": None}, "where they meet"),
        ({"addresses": {"boss": ("a:1",)}}, "no role"),
        ({"addresses": {"chief": ("a:1", "b:1")}}, "at most one chief"),
        ({"addresses": {"ps": ("a:1",)}}, "needs a chief or a worker"),
    ],
)
def test_what_cannot_be_one_cluster_is_refused(change: dict[str, object], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        replace(TWO, **change)  # type: ignore[arg-type]


@given(
    st.from_regex(r"[a-z0-9-]{1,9}(\.[a-z0-9-]{1,9}){0,3}\.?", fullmatch=True),
    st.integers(1, 65535),
)
def test_an_address_is_read_as_it_was_written(host: str, port: int) -> None:
    assert split_address(f"{host}:{port}") == (host, port)


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert split_address("[fe80::1]:29500") == ("fe80::1", 29500)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        ":1",
        "::1:5",
        "[]:1",
        "[a]:1",
        "grpc://a:1",
        "a:0",
        "a:65536",
        "a:-1",
        "a:1.5",
        "a:²",
        "a b:1",
        "a..b:1",
        ".a:1",
        f"{'a' * 64}:1",
    ],
)
def test_a_broken_address_is_named(address: str) -> None:
    with pytest.raises(UserError) as error:
        split_address(address)
    assert repr(address) in str(error.value)


def test_loopback_names() -> None:
    for host in ("localhost", "LOCALHOST", "127.0.0.1", "127.0.1.1", "::1", "0.0.0.0"):
        assert is_loopback(host)
    assert not is_loopback("10.0.0.1")


def test_one_machine_has_one_name() -> None:
    both = {"worker": ("localhost:1", "127.0.0.1:2")}
    task = Task("worker", 0)
    assert not ClusterSpec(both, task, 0, 2, 0, 2, "localhost:1", "the test").spans_hosts
    for host in ("localhost.", "0:0:0:0:0:0:0:1"):
        assert is_loopback(host)
