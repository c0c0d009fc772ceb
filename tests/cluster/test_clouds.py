from __future__ import annotations

from collections.abc import Callable

import pytest

from spartito.cluster import ClusterSpec, Task, resolve
from spartito.cluster.clouds import from_clouds
from spartito.cluster.resolver import remarks
from spartito.errors import UserError
from tests.cluster.environments import open_mpi
from tests.cluster.orchestrated import SKYPILOT_SETUP, TORCHRUN, dstack, skypilot

Tool = Callable[..., dict[str, str]]
both = pytest.mark.parametrize("tool", [skypilot, dstack])


def test_each_node_of_skypilot_is_a_worker() -> None:
    assert resolve(skypilot(1)) == ClusterSpec(
        addresses={"worker": ("172.31.4.10:29500", "172.31.4.11:29500", "172.31.4.12:29500")},
        task=Task("worker", 1),
        rank=1,
        world_size=3,
        local_rank=0,
        local_size=1,
        rendezvous="172.31.4.10:29500",
        source="SkyPilot",
    )


def test_each_node_of_dstack_is_a_worker() -> None:
    specs = [resolve(dstack(rank)) for rank in range(3)]
    assert [spec.rank for spec in specs] == [0, 1, 2]
    assert {spec.rendezvous for spec in specs} == {"10.128.0.7:29500"}
    assert {spec.source for spec in specs} == {"dstack"}


@both
def test_nodes_have_roles_in_their_order(tool: Tool) -> None:
    roles = {"SPARTITO_CHIEF": "1", "SPARTITO_PS": "2", "SPARTITO_EVALUATOR": "1"}
    specs = [resolve(tool(rank, 6) | roles) for rank in range(6)]
    told = ["chief 0", "worker 0", "worker 1", "ps 0", "ps 1", "evaluator 0"]
    assert [str(spec.task) for spec in specs] == told
    assert [spec.rank for spec in specs[:3]] == [0, 1, 2]
    assert all(spec.addresses == specs[0].addresses for spec in specs)
    assert [spec.address_of(spec.task) for spec in specs] == [
        f"{host}:29500" for name, value in tool(0, 6).items() if "IPS" in name
        for host in value.split()
    ]  # fmt: skip


@both
def test_the_ports_of_the_job_are_theirs(tool: Tool) -> None:
    spec = resolve(tool(0) | {"SPARTITO_PORTS": "4000-4010"})
    assert spec.rendezvous is not None
    assert spec.rendezvous.endswith(":4000")


@pytest.mark.parametrize("env", [skypilot(0, 1), dstack(0, 1), SKYPILOT_SETUP, {}])
def test_one_node_and_what_prepares_it_are_alone(env: dict[str, str]) -> None:
    assert from_clouds(env) is None
    assert resolve(env) == ClusterSpec.alone()


@both
def test_torchrun_and_mpirun_on_the_nodes_speak_for_themselves(tool: Tool) -> None:
    assert resolve(tool(1) | TORCHRUN).source == "torchrun's variables"
    env = tool(1) | open_mpi(2) | {"MASTER_ADDR": "a"}
    spec = resolve(env)
    assert "MPI" in spec.source
    (passed,) = remarks(spec, env)
    assert passed.endswith("passed over: SkyPilot or dstack")


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (skypilot(1) | {"SKYPILOT_NODE_IPS": "a b"}, "node 1 of 3, and in SKYPILOT_NODE_IPS"),
        (dstack(1) | {"DSTACK_NODES_IPS": "\n\n"}, "addresses of 0: none"),
        (dstack(3), "node 3 of 3"),
        (dstack(1) | {"DSTACK_NODE_RANK": "x"}, "DSTACK_NODE_RANK='x' is not a whole number"),
        (dstack(1) | {"DSTACK_NODES_IPS": "a\na\nb"}, "worker 0 and worker 1 have one address"),
        (skypilot(1) | {"SPARTITO_PS": "3"}, "SPARTITO_PS=3, but SkyPilot has 3 tasks"),
        (skypilot(1) | {"SPARTITO_CHIEF": "2"}, "SPARTITO_CHIEF=2, but a job has at most one"),
        (skypilot(1) | {"SPARTITO_EVALUATOR": "2"}, "at most one evaluator"),
    ],
)
def test_nodes_that_are_no_cluster_are_refused(env: dict[str, str], told: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(env)
    assert told in str(caught.value)
