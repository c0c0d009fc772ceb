"""Who we are by the variables of ``mpirun``: Open MPI, MVAPICH, MPICH, Intel MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spartito.cluster.listed import address, count
from spartito.cluster.spec import ClusterSpec, Task, is_loopback
from spartito.errors import UserError

PORT = 29_500
"""Where the processes meet unless ``MASTER_PORT`` says otherwise."""


@dataclass(frozen=True, slots=True)
class Family:
    """The variables of one kind of ``mpirun``."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


FAMILIES = (
    Family(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Family(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Family("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Intel MPI speaks as MPICH does. Slurm's srun may set PMI_RANK, but nothing local."""


def speaks(env: Mapping[str, str]) -> bool:
    """Whether ``mpirun`` started this process beside others."""
    return size(env) not in ("", "1")


def size(env: Mapping[str, str]) -> str:
    """The number of processes that ``mpirun`` started, as it is written; ``""`` without it."""
    family = _family(env)
    return env[family.size].strip() if family else ""


def from_mpi(env: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster of so many workers; None where ``mpirun`` started none, or this one alone.

    They meet at ``MASTER_ADDR`` and ``MASTER_PORT`` (29500), on one machine at its loopback.
    """
    family = _family(env)
    if family is None or not speaks(env):
        return None
    rank, world = count(env, family.rank), count(env, family.size)
    local_rank, local_size = count(env, family.local_rank), count(env, family.local_size)
    meeting = address(_host(env, family, world, local_size), count(env, "MASTER_PORT", PORT))
    return ClusterSpec(
        addresses={"worker": (meeting, *[""] * (world - 1))},
        task=Task("worker", rank),
        rank=rank,
        num_replicas=world,
        local_rank=local_rank,
        local_size=local_size,
        rendezvous=meeting,
        source=family.name,
    )


def _family(env: Mapping[str, str]) -> Family | None:
    for family in FAMILIES:
        if all(
            env.get(n) for n in (family.rank, family.size, family.local_rank, family.local_size)
        ):
            return family
    return None


def _host(env: Mapping[str, str], family: Family, world: int, local: int) -> str:
    given = env.get("MASTER_ADDR", "").strip()
    if local >= world:
        return given or "127.0.0.1"
    if given and not is_loopback(given):
        return given
    what = f"MASTER_ADDR={given!r} means each machine itself" if given else "MASTER_ADDR is not set"
    raise UserError(
        f"{family.name} started {world} processes, {local} of them here, but {what}",
        "Name the machine of the first process: MASTER_ADDR=$(hostname) mpirun ..., with "
        "-x MASTER_ADDR for Open MPI.",
    )
