"""What the environment of one task looks like under each launcher.

Those of Slurm were recorded under Slurm 22.05, those of Open MPI under 4.1; numbers, paths and
addresses were made neutral. Those of Kubeflow and Kubernetes are what the sources of their
controllers set: training-operator 1.9 (PyTorchJob, TFJob), trainer 2.0 to 2.3 (TrainJob),
mpi-operator 0.8 (MPIJob), JobSet 0.9; those of SkyPilot 0.14 and of dstack's runner, what theirs
set. The others are after their manuals.
"""

from __future__ import annotations

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
