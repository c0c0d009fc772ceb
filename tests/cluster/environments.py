"""What the environment of one task looks like under each launcher, after its manual."""

from __future__ import annotations

ALLOCATION = {
    "SLURM_CLUSTER_NAME": "cluster",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train.sbatch",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_PARTITION": "batch",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "node[01-02]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_SUBMIT_DIR": "/home/user",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}

SBATCH_SHELL = ALLOCATION | {
    "ENVIRONMENT": "BATCH",
    "SLURMD_NODENAME": "node01",
    "SLURM_GTIDS": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_TASK_PID": "812",
}
"""The batch script itself: it has a rank, but is no step."""

SALLOC = ALLOCATION | {"SLURM_JOB_NAME": "interactive", "SLURM_SUBMIT_HOST": "login1"}
"""The shell that salloc opens where it was called."""

SALLOC_ON_NODE = SALLOC | {
    "SLURM_GTIDS": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_PTY_PORT": "38113",
    "SLURM_PTY_WIN_COL": "204",
    "SLURM_PTY_WIN_ROW": "51",
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "node01",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
"""The shell that salloc opens on the first node (LaunchParameters=use_interactive_step)."""


def srun(rank: int, **changes: str) -> dict[str, str]:
    """Task ``rank`` of ``srun`` in a job of two nodes with two tasks each."""
    return (
        ALLOCATION
        | {
            "SLURMD_NODENAME": f"node0{rank // 2 + 1}",
            "SLURM_CPU_BIND": "quiet,mask_cpu:0x1,0x2",
            "SLURM_DISTRIBUTION": "block",
            "SLURM_GTIDS": "0,1" if rank < 2 else "2,3",
            "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
            "SLURM_LOCALID": str(rank % 2),
            "SLURM_NODEID": str(rank // 2),
            "SLURM_PROCID": str(rank),
            "SLURM_SRUN_COMM_HOST": "10.0.0.1",
            "SLURM_STEPID": "0",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "node[01-02]",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_TASK_PID": str(900 + rank),
        }
        | changes
    )


def one_node(rank: int) -> dict[str, str]:
    """Task ``rank`` of ``srun -N1 -n2``."""
    changes = {"LOCALID": str(rank), "NODEID": "0", "JOB_NODELIST": "gpu5", "NODELIST": "gpu5"}
    step = {"NODELIST": "gpu5", "NUM_NODES": "1", "NUM_TASKS": "2", "TASKS_PER_NODE": "2"}
    own = {f"SLURM_{name}": value for name, value in changes.items()}
    return srun(rank) | own | {f"SLURM_STEP_{name}": value for name, value in step.items()}


SRUN_SHELL = srun(0) | {
    "SLURM_JOB_NAME": "bash",
    "SLURM_PTY_PORT": "38113",
    "SLURM_PTY_WIN_COL": "204",
    "SLURM_PTY_WIN_ROW": "51",
}
"""``srun -N2 -n4 --pty bash``: a person types here."""


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
        "PMIX_NAMESPACE": "prterun-node01-1@1",
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


def pytorch_job(node: int) -> dict[str, str]:
    """The container of a PyTorchJob with one master and one worker."""
    return {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "MASTER_ADDR": "train-master-0",
        "MASTER_PORT": "23456",
        "PET_MASTER_ADDR": "train-master-0",
        "PET_MASTER_PORT": "23456",
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(node),
        "PYTHONUNBUFFERED": "1",
        "RANK": str(node),
        "WORLD_SIZE": "2",
    }


def train_job(node: int) -> dict[str, str]:
    """The container of a TrainJob, the later kind, which leaves the processes to torchrun."""
    return {
        "JOB_COMPLETION_INDEX": str(node),
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29400",
        "PET_NNODES": "3",
        "PET_NODE_RANK": str(node),
        "PET_NPROC_PER_NODE": "auto",
    }


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
