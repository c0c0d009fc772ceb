from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.cluster import Task
from spartito.cluster.address_list import count, named_task, spec_of, task_of, with_servers
from spartito.errors import UserError
from spartito.wire.addresses import address


@given(st.integers(1, 9), st.integers(0, 8))
def test_the_last_numbers_are_servers(workers: int, servers: int) -> None:
    addresses = [f"h{number}:1" for number in range(workers + servers)]
    cluster = with_servers(addresses, servers)
    assert ("ps" in cluster) == (servers > 0)
    tasks = [task_of(number, cluster) for number in range(len(addresses))]
    assert [cluster[task.type][task.index] for task in tasks] == addresses
    assert len(set(tasks)) == len(addresses)
    specs = [spec_of(cluster, task, "a test") for task in tasks]
    assert [spec.rank for spec in specs] == [*range(workers), *[-1] * servers]


def test_an_address_has_brackets_where_it_needs_them() -> None:
    assert address("a", 1) == "a:1"
    assert address("::1", 1) == address("[::1]", 1) == "[::1]:1"
    with pytest.raises(UserError, match="70000"):
        address("a", 70_000)


def test_a_count_is_a_whole_number() -> None:
    assert count({"N": " 3 "}, "N") == 3
    assert count({}, "N", 4) == count({"N": " "}, "N", 4) == 4
    for env, words in (({}, "N is not set"), ({"N": "-1"}, "'-1'"), ({"N": "²"}, "'²'")):
        with pytest.raises(UserError, match=words):
            count(env, "N")


def test_a_task_is_named() -> None:
    assert named_task({}) is None
    assert named_task({"SPARTITO_TASK": "ps  3"}) == Task("ps", 3)
