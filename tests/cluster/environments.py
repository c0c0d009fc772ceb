"""What the environment of one task looks like under each launcher.

Those of Slurm were recorded under Slurm 22.05, those of Open MPI under 4.1; numbers, paths and
addresses were made neutral. Those of Kubeflow and Kubernetes are what the sources of their
controllers set: training-operator 1.9 (PyTorchJob, TFJob), trainer 2.0 to 2.3 (TrainJob),
mpi-operator 0.8 (MPIJob), JobSet 0.9; those of SkyPilot 0.14 and of dstack's runner, what theirs
set. The others are after their manuals.
"""

from __future__ import annotations

import json

NTASKS_PER_NODE, CPUS_PER_TASK = "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK"
"""What is there only where the job was asked for it."""

ALLOCATION = {
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_PARTITION": "batch",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NODE_ALIASES": "(null)",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_SUBMIT_DIR": "/home/user",
    "SLURM_SUBMIT_HOST": "login1",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
"""What a job of two nodes with two tasks each says to all."""

ON_A_NODE = {
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_JOB_GID": "1000",
    "SLURM_JOB_UID": "1000",
    "SLURM_JOB_USER": "user",
    "SLURM_PRIO_PROCESS": "0",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
    "SLURM_WORKING_CLUSTER": "test:node1:6817:9728:109",
}

SBATCH_SHELL = (
    ALLOCATION
    | ON_A_NODE
    | {
        "ENVIRONMENT": "BATCH",
        "SLURMD_NODENAME": "node1",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_GTIDS": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_TASK_PID": "120",
        "SLURM_TOPOLOGY_ADDR": "node1",
    }
)
"""The batch script itself: it has a rank, but no step."""

SALLOC = ALLOCATION | {"SLURM_JOB_NAME": "interactive"}
"""The shell that salloc opens where it was called."""

STEP = ON_A_NODE | {
    "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0": "2(x2)",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_SRUN_COMM_HOST": "10.0.0.1",
    "SLURM_SRUN_COMM_PORT": "34259",
    "SLURM_STEP_LAUNCHER_PORT": "34259",
    "SRUN_DEBUG": "3",
}

SALLOC_ON_NODE = (
    SALLOC
    | STEP
    | {
        "SLURMD_NODENAME": "node1",
        "SLURM_GTIDS": "0",
        "SLURM_LOCALID": "0",
        "SLURM_MPI_TYPE": "none",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_PTY_PORT": "43491",
        "SLURM_STEPID": "4294967290",
        "SLURM_STEP_ID": "4294967290",
        "SLURM_STEP_NODELIST": "node1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_TASK_PID": "222",
        "SLURM_TOPOLOGY_ADDR": "node1",
    }
)
"""The shell that salloc opens on the first node (LaunchParameters=use_interactive_step)."""


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    """``env`` where ``names`` are not set."""
    return {name: value for name, value in env.items() if name not in names}


def srun(rank: int, **changes: str) -> dict[str, str]:
    """Task ``rank`` of ``srun`` in a batch job of two nodes with two tasks each."""
    node = rank // 2 + 1
    return (
        ALLOCATION
        | STEP
        | {
            "ENVIRONMENT": "BATCH",
            "SLURMD_NODENAME": f"node{node}",
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_DISTRIBUTION": "block",
            "SLURM_GTIDS": "0,1" if node == 1 else "2,3",
            "SLURM_LOCALID": str(rank % 2),
            "SLURM_NODEID": str(node - 1),
            "SLURM_PROCID": str(rank),
            "SLURM_STEPID": "0",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "node[1-2]",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_TASK_PID": str(140 + rank),
            "SLURM_TOPOLOGY_ADDR": f"node{node}",
            "SLURM_UMASK": "0022",
        }
        | changes
    )


def het(rank: int) -> dict[str, str]:
    """Task ``rank`` of ``srun --het-group=0,1``: one on node2, three on node1, in a sorted list."""
    server = rank > 0
    return without(srun(rank), "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK") | {
        "SLURMD_NODENAME": "node1" if server else "node2",
        "SLURM_DISTRIBUTION": "block" if server else "cyclic",
        "SLURM_GTIDS": "1,2,3" if server else "0",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_CPUS_PER_NODE": "3,1",
        "SLURM_JOB_ID_HET_GROUP_0": "4711",
        "SLURM_JOB_ID_HET_GROUP_1": "4712",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "node2",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "node1",
        "SLURM_LOCALID": str(max(0, rank - 1)),
        "SLURM_NODEID": str(int(server)),
        "SLURM_NTASKS_HET_GROUP_0": "1",
        "SLURM_NTASKS_HET_GROUP_1": "3",
        "SLURM_STEP_TASKS_PER_NODE": "3,1",
        "SLURM_TASKS_PER_NODE": "3,1",
        "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
        "SLURM_TASKS_PER_NODE_HET_GROUP_1": "3",
    }


def cyclic(rank: int) -> dict[str, str]:
    """The same under ``srun --distribution=cyclic``."""
    node, local = rank % 2, rank // 2
    return srun(
        rank,
        SLURMD_NODENAME=f"node{node + 1}",
        SLURM_DISTRIBUTION="cyclic",
        SLURM_GTIDS="0,2" if node == 0 else "1,3",
        SLURM_LOCALID=str(local),
        SLURM_NODEID=str(node),
        SLURM_STEPID="3",
        SLURM_STEP_ID="3",
        SLURM_TOPOLOGY_ADDR=f"node{node + 1}",
    )


def one_node(rank: int) -> dict[str, str]:
    """Task ``rank`` of ``srun`` in a batch job of one node with two tasks."""
    job = ("JOB_NODELIST", "NODELIST", "STEP_NODELIST", "TOPOLOGY_ADDR")
    ones = ("JOB_NUM_NODES", "NNODES", "STEP_NUM_NODES")
    counts = ("NPROCS", "NTASKS", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE", "TASKS_PER_NODE")
    twos = (*counts, "JOB_CPUS_PER_NODE", "JOB_CPUS_PER_NODE_PACK_GROUP_0")
    values = dict.fromkeys(job, "node1") | dict.fromkeys(ones, "1") | dict.fromkeys(twos, "2")
    here = values | {"GTIDS": "0,1", "LOCALID": str(rank), "NODEID": "0"}
    own = {f"SLURM_{name}": value for name, value in here.items()}
    return without(srun(rank, SLURMD_NODENAME="node1") | own, NTASKS_PER_NODE, CPUS_PER_TASK)


def uneven(rank: int) -> dict[str, str]:
    """Task ``rank`` of ``srun`` in a batch job of two nodes with three tasks, two and one."""
    threes = dict.fromkeys(("SLURM_NPROCS", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "3")
    per_node = ("JOB_CPUS_PER_NODE", "STEP_TASKS_PER_NODE", "TASKS_PER_NODE")
    split = {f"SLURM_{name}": "2,1" for name in per_node}
    gtids = {"SLURM_GTIDS": "0,1" if rank < 2 else "2", "SLURM_CPUS_ON_NODE": str(2 - rank // 2)}
    return without(srun(rank) | threes | split | gtids, NTASKS_PER_NODE, CPUS_PER_TASK)


def srun_alone(rank: int) -> dict[str, str]:
    """The same as `srun`, started by hand and outside of any allocation."""
    allocated = ("SLURM_DISTRIBUTION", "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0", "SLURM_NODE_ALIASES")
    batch = ("ENVIRONMENT", CPUS_PER_TASK)
    return without(srun(rank, SLURM_JOB_NAME="python"), *allocated, *batch)


def srun_in_salloc(rank: int) -> dict[str, str]:
    """Task ``rank`` of ``srun`` from the shell that salloc opened on the first node.

    ``srun --pty bash`` from a shell that salloc opened where it was called says the same.
    """
    terminal = {"SLURM_JOB_NAME": "interactive", "SLURM_PTY_PORT": "43491"}
    return without(srun(rank) | terminal, "ENVIRONMENT", CPUS_PER_TASK)


SRUN_SHELL = srun_alone(0) | {"SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "41227"}
"""``srun -N2 --ntasks-per-node=2 --pty bash``: a person types here."""

MPI_ON_SECOND_NODE = (
    ALLOCATION
    | STEP
    | {
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_NODE_RANK": "0",
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "3",
        "SLURMD_NODENAME": "node2",
        "SLURM_DISTRIBUTION": "cyclic",
        "SLURM_GTIDS": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NPROCS": "1",
        "SLURM_NTASKS": "1",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_PROCID": "0",
        "SLURM_STEPID": "1",
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_NODELIST": "node2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_TASKS_PER_NODE": "1",
    }
)
"""The last process of ``mpirun -n 3`` in a batch job: mpirun's daemon is in a step of its own."""


def open_mpi(rank: int, machines: int = 1) -> dict[str, str]:
    """Process ``rank`` of ``mpirun -n 4`` over so many machines."""
    here = 4 // machines
    return {
        "OMPI_APP_CTX_NUM_PROCS": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % here),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(here),
        "OMPI_COMM_WORLD_NODE_RANK": str(rank % here),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_UNIVERSE_SIZE": "4",
        "PMIX_NAMESPACE": "1243217921",
        "PMIX_RANK": str(rank),
    }


def mpich(rank: int) -> dict[str, str]:
    """Process ``rank`` of MPICH's or Intel's ``mpiexec -n 2`` on one machine."""
    return {
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": str(rank),
        "PMI_FD": "6",
        "PMI_RANK": str(rank),
        "PMI_SIZE": "2",
    }


def hydra_alone(rank: int) -> dict[str, str]:
    """Process ``rank`` of two of a launcher that speaks PMI and says nothing of machines."""
    return {"PMI_FD": "6", "PMI_RANK": str(rank), "PMI_SIZE": "2"}


def flux(rank: int, machines: int = 1) -> dict[str, str]:
    """Process ``rank`` of ``flux run -n 4`` over so many machines."""
    return {
        "FLUX_JOB_ID": "f2tgVcXcj",
        "FLUX_JOB_NNODES": str(machines),
        "FLUX_JOB_SIZE": "4",
        "FLUX_TASK_LOCAL_ID": str(rank % (4 // machines)),
        "FLUX_TASK_RANK": str(rank),
        "PMI_FD": "9",
        "PMI_RANK": str(rank),
        "PMI_SIZE": "4",
    }


def jsrun(rank: int) -> dict[str, str]:
    """Process ``rank`` of LSF's ``jsrun -n 4`` over two machines."""
    return {
        "JSM_NAMESPACE_LOCAL_RANK": str(rank % 2),
        "JSM_NAMESPACE_LOCAL_SIZE": "2",
        "JSM_NAMESPACE_RANK": str(rank),
        "JSM_NAMESPACE_SIZE": "4",
        "PMIX_RANK": str(rank),
    }


def pals(rank: int) -> dict[str, str]:
    """Process ``rank`` of ``mpiexec -n 4 --ppn 2`` of HPE's PALS."""
    return {
        "PALS_LOCAL_RANKID": str(rank % 2),
        "PALS_LOCAL_SIZE": "2",
        "PALS_NODEID": str(rank // 2),
        "PALS_RANKID": str(rank),
        "PMI_LOCAL_RANK": str(rank % 2),
        "PMI_LOCAL_SIZE": "2",
        "PMI_RANK": str(rank),
        "PMI_SIZE": "4",
    }


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
