from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.cluster import Task, resolve
from spartito.errors import UserError
from spartito.launch.processes.local import RUNTIME, role_environments
from spartito.launch.processes.roles import RESTARTS, Roles, task_environments

CASTS = st.builds(Roles, st.integers(1, 4), st.integers(0, 3), st.booleans(), st.booleans())


@given(CASTS)
def test_each_task_reads_who_it_is(roles: Roles) -> None:
    ports = [20000 + index for index in range(len(roles.tasks))]
    told = task_environments({"A": "1", "RANK": "7", "MASTER_ADDR": "x"}, roles, ports)
    specs = [resolve(env) for env in told]
    assert [spec.task for spec in specs] == list(roles.tasks)
    assert [int(s.address_of(s.task).split(":")[1]) for s in specs] == ports
    assert len({json.dumps(json.loads(env["TF_CONFIG"])["cluster"]) for env in told}) == 1
    assert [spec.is_chief for spec in specs] == [True] + [False] * (len(specs) - 1)
    for env, task in zip(told, roles.tasks, strict=True):
        assert env["A"] == "1"
        assert env.keys().isdisjoint({"RANK", "MASTER_ADDR"})
        assert env.get("CUDA_VISIBLE_DEVICES") == ("" if task.type == "ps" else None)


@given(CASTS, st.integers(1, 64))
def test_cores_are_shared_among_those_that_compute(roles: Roles, cores: int) -> None:
    for task, env in zip(roles.tasks, role_environments({}, roles, cores), strict=True):
        expected = max(1, cores // roles.workers) if task.type == "worker" else 1
        assert env["OMP_NUM_THREADS"] == str(expected)
        assert RUNTIME.items() <= env.items()


def test_what_the_user_set_stays() -> None:
    roles = Roles(2, ps=1)
    given_ = {"OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "1"}
    *workers, server = role_environments(given_, roles)
    assert all(given_.items() <= env.items() for env in workers)
    assert (server["OMP_NUM_THREADS"], server["CUDA_VISIBLE_DEVICES"]) == ("7", "")


def test_no_two_tasks_share_a_port() -> None:
    (cluster,) = {
        json.dumps(json.loads(env["TF_CONFIG"])["cluster"])
        for env in role_environments({}, Roles(4, 4, True, True))
    }
    addresses = [a for tasks in json.loads(cluster).values() for a in tasks]
    assert len(set(addresses)) == len(addresses) == 10


@pytest.mark.parametrize(
    ("roles", "restarted", "not_vital"),
    [
        (Roles(2), "", ""),
        (Roles(2, evaluator=True), "evaluator 0", "evaluator 0"),
        (Roles(2, ps=1), "worker 1, ps 0", "worker 1"),
        (
            Roles(2, ps=2, evaluator=True, chief=True),
            "worker 0, worker 1, ps 0, ps 1, evaluator 0",
            "worker 0, worker 1, evaluator 0",
        ),
    ],
)
def test_the_policy_of_each_role(roles: Roles, restarted: str, not_vital: str) -> None:
    assert ", ".join(str(task) for task in roles.tasks if roles.restarts(task)) == restarted
    assert {roles.restarts(task) for task in roles.tasks} <= {0, RESTARTS}
    assert ", ".join(str(task) for task in roles.tasks if not roles.is_vital(task)) == not_vital


def test_the_coordinator_comes_first() -> None:
    assert Roles(2, 1, True).tasks[0] == Task("worker", 0)
    assert Roles(2, 1, True, chief=True).tasks[0] == Task("chief", 0)


@pytest.mark.parametrize(
    ("roles", "source", "words"),
    [
        ({"ps": -1}, None, ["--ps -1", "less than 0"]),
        ({"chief": True}, None, ["--chief without --ps"]),
        ({"ps": 1, "chief": True}, "TF_CONFIG", ["--ps 1 --chief, but TF_CONFIG says"]),
        ({"evaluator": True}, "TF_CONFIG", ["--evaluator, but TF_CONFIG says"]),
    ],
)
def test_each_mistake_names_the_value_and_the_rule(
    roles: dict[str, Any], source: str | None, words: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        Roles(2, **roles).check(source)
    assert all(word in str(error.value) for word in words), str(error.value)
