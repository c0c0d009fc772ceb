"""The environments that operators of Kubernetes, torchrun and clouds make."""

from __future__ import annotations

import json


def pytorch_job(node: int, each: str = "auto") -> dict[str, str]:
    """The container of a PyTorchJob with one master and one worker, of so many processes each."""
    world = 2 * (int(each) if each.isdecimal() else 1)
    return {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "MASTER_ADDR": "train-master-0",
        "MASTER_PORT": "23456",
        "PET_MASTER_ADDR": "train-master-0",
        "PET_MASTER_PORT": "23456",
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(node),
        "PET_NPROC_PER_NODE": each,
        "PYTHONUNBUFFERED": "1",
        "RANK": str(node),
        "WORLD_SIZE": str(world),
    }


ELASTIC_PYTORCH_JOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "PET_NNODES": "1:2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "train-worker-0:23456",
    "PYTHONUNBUFFERED": "1",
}
"""A pod of an elastic PyTorchJob: the number of nodes is a range, and no pod has a number."""


def tf_job(role: str, index: int) -> dict[str, str]:
    """A pod of a TFJob with a chief, two workers, a server and an evaluator."""
    counts = {"chief": 1, "evaluator": 1, "ps": 1, "worker": 2}
    cluster = {
        each: [f"train-{each}-{i}.ml.svc:2222" for i in range(count)]
        for each, count in counts.items()
    }
    task = {"type": role, "index": index}
    config = {"cluster": cluster, "task": task, "environment": "cloud"}
    return {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "TF_CONFIG": json.dumps(config)}


DYNAMIC_TF_JOB = {
    "TF_CONFIG": json.dumps(
        {
            "cluster": {"worker": {"1": "train-worker-1.ml.svc:2222"}, "ps": []},
            "task": {"type": "worker", "index": 1},
        }
    )
}
"""A worker of a TFJob with enableDynamicWorker: it hears of no other worker."""

MPI_JOB_LAUNCHER = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "K_MPI_JOB_ROLE": "launcher",
    "NVIDIA_DRIVER_CAPABILITIES": "",
    "NVIDIA_VISIBLE_DEVICES": "",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_set_default_slots": "1",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}
"""The launcher of an MPIJob of Open MPI, in which mpirun is typed."""


def train_job(node: int, each: str = "auto", nodes: int = 3) -> dict[str, str]:
    """The container of a TrainJob, the later kind: each node's processes are left to torchrun.

    ``each`` is "auto" where it has a GPU, else the CPUs that it asks for, and "1" where it asks
    for none.
    """
    return {
        "JOB_COMPLETION_INDEX": str(node),
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29500",
        "PET_NNODES": str(nodes),
        "PET_NODE_RANK": str(node),
        "PET_NPROC_PER_NODE": each,
    }


JOB_SET = {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
"""A pod of a JobSet, which sets no variable beside the Job's."""


def indexed_job(index: int) -> dict[str, str]:
    """A pod of an indexed Job with two workers and a parameter server."""
    return {
        "JOB_COMPLETION_INDEX": str(index),
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "SPARTITO_PODS": "train-{index}.train:29500",
        "SPARTITO_PS": "1",
        "SPARTITO_WORKERS": "2",
    }


TORCHRUN = {
    "GROUP_RANK": "0",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "RANK": "1",
    "WORLD_SIZE": "4",
}


def skypilot(rank: int, nodes: int = 3) -> dict[str, str]:
    """The ``run`` of a task of SkyPilot 0.14 on one of so many nodes."""
    return {
        "SKYPILOT_CLUSTER_INFO": '{"cluster_name": "train", "cloud": "AWS"}',
        "SKYPILOT_INTERNAL_JOB_ID": "1",
        "SKYPILOT_NODE_IPS": "\n".join(f"172.31.4.{10 + node}" for node in range(nodes)),
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_TASK_ID": "sky-2026-11-23-01-02-03-456789_train_1",
        "SKYPILOT_USER": "user",
    }


SKYPILOT_SETUP = {
    "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_SETUP_NODE_IPS": "172.31.4.10\n172.31.4.11\n172.31.4.12",
    "SKYPILOT_SETUP_NODE_RANK": "1",
    "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": "0",
}
"""The ``setup`` of such a task, which prepares a node and is none of the job's."""


def dstack(rank: int, nodes: int = 3) -> dict[str, str]:
    """A node of a dstack task, as the runner of 0.20 sets it."""
    return {
        "DSTACK_GPUS_NUM": "0",
        "DSTACK_GPUS_PER_NODE": "0",
        "DSTACK_JOB_ID": "6f1c",
        "DSTACK_MASTER_NODE_IP": "10.128.0.7",
        "DSTACK_MPI_HOSTFILE": "/dstack/mpi/hostfile",
        "DSTACK_NODES_IPS": "\n".join(f"10.128.0.{7 + node}" for node in range(nodes)),
        "DSTACK_NODES_NUM": str(nodes),
        "DSTACK_NODE_RANK": str(rank),
        "DSTACK_REPO_DIR": "",
        "DSTACK_REPO_ID": "none",
        "DSTACK_RUN_ID": "0c4d",
        "DSTACK_RUN_NAME": "train",
        "DSTACK_WORKING_DIR": "/runs",
    }
