from __future__ import annotations

import pytest

from spartito.cluster import ClusterSpec, Task
from spartito.cluster.kubernetes import from_kubernetes
from spartito.cluster.resolver import remarks, resolve
from spartito.cluster.torchrun import from_torchrun
from spartito.errors import UserError
from tests.cluster.environments import open_mpi
from tests.cluster.orchestrated import (
    DYNAMIC_TF_JOB,
    ELASTIC_PYTORCH_JOB,
    JOB_SET,
    MPI_JOB_LAUNCHER,
    TORCHRUN,
    indexed_job,
    pytorch_job,
    tf_job,
    train_job,
)


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
    assert spec.rendezvous == "train-node-0-0.train:29500"


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


@pytest.mark.parametrize(
    ("env", "rank", "world"),
    [
        (pytorch_job(1, "8"), 1, 2),
        (train_job(2, "8"), 2, 3),
        (train_job(0, "4", nodes=1), 0, 1),
    ],
)
def test_processes_that_kubeflow_counts_from_a_cpu_limit_are_one_under_python(
    env: dict[str, str], rank: int, world: int
) -> None:
    spec = resolve(env)
    assert (spec.rank, spec.world_size, spec.local_size) == (rank, world, 1)
    (remark,) = remarks(spec, env)
    each = env["PET_NPROC_PER_NODE"]
    assert f"PET_NPROC_PER_NODE={each}, but this pod runs one process" in remark
    for quiet in ("auto", "1"):
        assert remarks(spec, env | {"PET_NPROC_PER_NODE": quiet}) == ()


def test_an_elastic_job_is_torchruns() -> None:
    with pytest.raises(UserError, match=r"PET_NNODES='1:2'.*torchrun"):
        resolve(ELASTIC_PYTORCH_JOB)
    inside = ELASTIC_PYTORCH_JOB | TORCHRUN
    assert resolve(inside).world_size == 4


def test_a_tf_job_tells_all_roles() -> None:
    specs = {
        role: resolve(tf_job(role, index))
        for role, index in (("chief", 0), ("worker", 1), ("ps", 0), ("evaluator", 0))
    }
    assert [str(spec.task) for spec in specs.values()] == [
        "chief 0",
        "worker 1",
        "ps 0",
        "evaluator 0",
    ]
    assert {spec.rendezvous for spec in specs.values()} == {"train-chief-0.ml.svc:2222"}
    assert specs["worker"].address_of(Task("worker", 1)) == "train-worker-1.ml.svc:2222"
    with pytest.raises(UserError, match="must be a list"):
        resolve(DYNAMIC_TF_JOB)


def test_an_mpi_job_is_the_processes_of_mpirun() -> None:
    assert resolve(MPI_JOB_LAUNCHER).world_size == 1
    started = {**MPI_JOB_LAUNCHER, **open_mpi(3, machines=2)}
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        resolve(started)
    spec = resolve(started | {"MASTER_ADDR": "train-worker-0.train"})
    assert (spec.rank, spec.world_size, spec.local_size) == (3, 4, 2)
    assert spec.rendezvous == "train-worker-0.train:29500"


def test_a_pod_of_a_job_set_knows_its_number_alone() -> None:
    assert resolve(JOB_SET).world_size == 1
    pods = {"SPARTITO_WORKERS": "2", "SPARTITO_PODS": "train-task-0-{index}.train:29500"}
    spec = resolve(JOB_SET | pods)
    assert (spec.rank, spec.rendezvous) == (1, "train-task-0-0.train:29500")
