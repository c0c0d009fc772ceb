from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.cluster import ClusterSpec, Task
from spartito.cluster.tf_config import from_tf_config
from spartito.errors import UserError


def read(cluster: Any, kind: Any = "worker", index: Any = 0, **more: Any) -> ClusterSpec:
    config = {"cluster": cluster, "task": {"type": kind, "index": index}} | more
    spec = from_tf_config({"TF_CONFIG": json.dumps(config)})
    assert spec is not None
    return spec


@pytest.mark.parametrize("env", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " \n"}])
def test_without_it_it_says_nothing(env: dict[str, str]) -> None:
    assert from_tf_config(env) is None


def test_the_tutorials_two_workers() -> None:
    cluster = {"worker": ["localhost:12345", "localhost:23456"]}
    spec = read(cluster, index=1)
    assert spec == ClusterSpec(
        addresses={"worker": ("localhost:12345", "localhost:23456")},
        task=Task("worker", 1),
        rank=1,
        world_size=2,
        local_rank=1,
        local_size=2,
        rendezvous="localhost:12345",
        source="TF_CONFIG",
    )
    assert not spec.is_chief
    assert read(cluster, index=0).is_chief


def test_an_explicit_chief_comes_first_and_is_where_they_meet() -> None:
    cluster = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    assert read(cluster, "chief").is_chief
    worker = read(cluster, "worker", 0)
    assert (worker.rank, worker.world_size, worker.is_chief) == (1, 3, False)
    assert worker.rendezvous == "a:1"


def test_servers_and_evaluators_are_no_replicas() -> None:
    cluster = {"worker": ["b:1"], "ps": ["c:1", "d:1"], "evaluator": ["e:1"]}
    for kind in ("ps", "evaluator"):
        spec = read(cluster, kind)
        assert (spec.rank, spec.world_size, spec.local_rank) == (-1, 1, -1)
        assert not spec.is_chief
        assert spec.rendezvous == "b:1"


def test_an_evaluator_may_be_left_out_of_the_cluster() -> None:
    spec = read({"worker": ["b:1", "c:1"]}, "evaluator")
    assert spec.task == Task("evaluator", 0)
    assert spec.world_size == 2
    assert spec.address_of(spec.task) == ""


def test_one_worker_has_nobody_to_meet() -> None:
    assert read({"worker": ["b:1"]}).rendezvous is None


def test_tasks_on_one_host_share_a_machine() -> None:
    cluster = {"worker": ["a:1", "b:1", "A:2"]}
    spec = read(cluster, index=2)
    assert (spec.local_rank, spec.local_size) == (1, 2)
    assert read(cluster, index=1).local_size == 1


def test_keys_of_others_are_passed_over() -> None:
    assert read({"worker": ["a:1"]}, environment="cloud", rpc_layer="grpc").world_size == 1


GOOD = {"worker": ["a:1", "b:1"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["'{'", "not JSON"]),
        ("[]", ["JSON object", "[]"]),
        ("{}", ["no 'cluster'"]),
        ('{"cluster": {"worker": ["a:1"]}}', ["no 'task'"]),
        ('{"cluster": ["a:1"], "task": {}}', ["must map roles", "['a:1']"]),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}', ["no 'index'"]),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}', ["no 'type'"]),
    ],
)
def test_a_broken_whole_is_named(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        from_tf_config({"TF_CONFIG": text})
    assert error.value.exit_code == 2
    assert all(word in str(error.value) for word in ["TF_CONFIG", *words])


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "words"),
    [
        ({"wroker": ["a:1"]}, "worker", 0, ["'wroker'", "'worker'"]),
        ({}, "worker", 0, ["no chief and no worker"]),
        ({"worker": []}, "worker", 0, ["no chief and no worker"]),
        ({"ps": ["a:1"]}, "ps", 0, ["no chief and no worker"]),
        ({"chief": ["a:1", "b:1"]}, "chief", 0, ["2 chiefs"]),
        (GOOD, "worker", 2, ["index 2", "0 to 1"]),
        (GOOD, "worker", -1, ["index -1", "0 to 1"]),
        (GOOD, "worker", True, ["true", "whole number"]),
        (GOOD, "worker", 0.0, ["0.0", "whole number"]),
        (GOOD, "chief", 0, ["chief 0", "no 'chief'"]),
        (GOOD, "ps", 0, ["ps 0", "no 'ps'"]),
        (GOOD, "evaluator", 1, ["evaluator 1"]),
        (GOOD, "works", 0, ["'works'", "'worker'"]),
        (GOOD, None, 0, ["None"]),
    ],
)
def test_each_mistake_names_the_value_and_the_rule(
    cluster: Any, kind: Any, index: Any, words: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        read(cluster, kind, index)
    assert all(word in str(error.value) for word in ["TF_CONFIG", *words]), str(error.value)


@given(st.booleans(), st.integers(0, 5), st.integers(0, 3), st.data())
def test_every_replica_reads_the_same_cluster(
    chief: bool, workers: int, servers: int, data: st.DataObject
) -> None:
    workers += not chief
    cluster = {
        "worker": [f"w{i // 2}:{1000 + i}" for i in range(workers)],
        "ps": [f"p{i}:1" for i in range(servers)],
    } | ({"chief": ["c:1"]} if chief else {})
    tasks = [("chief", 0)] * chief + [("worker", i) for i in range(workers)]
    specs = [read(cluster, *task) for task in tasks]
    assert [spec.rank for spec in specs] == list(range(len(tasks)))
    assert [spec.is_chief for spec in specs] == [True] + [False] * (len(tasks) - 1)
    assert {spec.world_size for spec in specs} == {len(tasks)}
    assert len({spec.rendezvous for spec in specs}) == 1
    one = data.draw(st.sampled_from(specs))
    again = {
        "cluster": {role: list(addresses) for role, addresses in one.addresses.items()},
        "task": {"type": one.task.type, "index": one.task.index},
    }
    assert from_tf_config({"TF_CONFIG": json.dumps(again)}) == one


def test_an_index_may_be_a_text_as_in_tensorflow() -> None:
    assert read({"worker": ["a:1", "b:1"]}, index="1").rank == 1
    for text in ("", "1x", "-1", "1.0"):
        with pytest.raises(UserError, match="is not a whole number"):
            read({"worker": ["a:1", "b:1"]}, index=text)
