from __future__ import annotations

import pytest

from spartito.cluster import ClusterSpec, Task
from spartito.cluster.kubernetes import from_kubernetes
from spartito.cluster.resolver import remarks, resolve
from spartito.cluster.torchrun import from_torchrun
from spartito.errors import UserError
from tests.cluster.environments import TORCHRUN, indexed_job, pytorch_job, train_job


def test_a_pytorch_job_is_one_process_per_pod() -> None:
    assert from_torchrun(pytorch_job(1)) is None
    assert from_kubernetes(pytorch_job(1)) == ClusterSpec(
        addresses={"worker": ("train-master-0:23456", "")},
        task=Task("worker", 1),
        rank=1,
        world_size=2,
        local_rank=0,
        local_size=1,
        rendezvous="train-master-0:23456",
        source="Kubeflow's PET_ variables",
    )


def test_a_train_job_names_its_first_node() -> None:
    spec = from_kubernetes(train_job(2))
    assert spec is not None
    assert (spec.rank, spec.world_size) == (2, 3)
    assert spec.rendezvous == "train-node-0-0.train:29400"


def test_torchrun_in_such_a_pod_speaks_for_itself() -> None:
    env = train_job(0) | TORCHRUN
    assert from_kubernetes(env) is None
    spec = from_torchrun(env)
    assert spec is not None
    assert spec.world_size == 4


def test_pods_of_a_job_know_each_other_by_their_number() -> None:
    specs = [from_kubernetes(indexed_job(index)) for index in range(3)]
    assert [str(spec.task) for spec in specs if spec] == ["worker 0", "worker 1", "ps 0"]
    assert specs[2] == ClusterSpec(
        addresses={
            "worker": ("train-0.train:29500", "train-1.train:29500"),
            "ps": ("train-2.train:29500",),
        },
        task=Task("ps", 0),
        rank=-1,
        world_size=2,
        local_rank=-1,
        local_size=0,
        rendezvous="train-0.train:29500",
        source="Kubernetes' indexed Job",
    )


def test_one_worker_needs_no_addresses() -> None:
    spec = from_kubernetes({"JOB_COMPLETION_INDEX": "0", "SPARTITO_WORKERS": "1"})
    assert spec is not None
    assert spec.rendezvous is None


def test_independent_pods_are_alone() -> None:
    assert from_kubernetes({}) is None
    assert from_kubernetes({"JOB_COMPLETION_INDEX": "3"}) is None
    assert from_kubernetes({"PET_NNODES": "1", "PET_NODE_RANK": "0"}) is None


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (indexed_job(3), ["JOB_COMPLETION_INDEX=3", "SPARTITO_WORKERS=2", "SPARTITO_PS=1"]),
        (indexed_job(0) | {"SPARTITO_WORKERS": "0"}, ["SPARTITO_WORKERS=0"]),
        (indexed_job(0) | {"SPARTITO_PODS": ""}, ["SPARTITO_PODS=''", "{index}"]),
        (indexed_job(0) | {"SPARTITO_PODS": "train:29500"}, ["'train:29500'"]),
        (indexed_job(0) | {"SPARTITO_PODS": "train-{index}"}, ["SPARTITO_PODS", "'train-0'"]),
        (indexed_job(0) | {"JOB_COMPLETION_INDEX": "x"}, ["'x'"]),
        (pytorch_job(2), ["rank 2 of 2"]),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, ["PET_MASTER_ADDR"]),
        ({"PET_NNODES": "2"}, ["PET_NODE_RANK is not set"]),
        ({"PET_NNODES": "1:2"}, ["'1:2'"]),
    ],
)
def test_what_does_not_fit_together_is_named(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        from_kubernetes(env)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_processes_that_kubeflow_counts_from_a_cpu_limit_are_one_under_python() -> None:
    env = pytorch_job(1) | {"PET_NPROC_PER_NODE": "8"}
    spec = resolve(env)
    assert (spec.rank, spec.world_size, spec.local_size) == (1, 2, 1)
    (remark,) = remarks(spec, env)
    assert "PET_NPROC_PER_NODE=8, but this pod runs one process" in remark
    assert remarks(spec, env | {"PET_NPROC_PER_NODE": "auto"}) == ()
