"""The cluster by the variables of ``mpirun`` and of other launchers that number processes.

Open MPI, MVAPICH, MPICH and Intel MPI, ``flux run``, LSF's ``jsrun``, HPE's PALS. They tell ranks
but no addresses. What tells a rank and leaves out the rest is refused: to train alone beside the
others would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spartito.cluster import srun
from spartito.cluster.listed import address, count
from spartito.cluster.spec import ClusterSpec, Task, is_loopback
from spartito.errors import UserError

PORT = 29_500
"""Where the processes meet unless ``MASTER_PORT`` says otherwise."""

LOCAL_RANK, LOCAL_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
"""torchrun's names, by which a user says what a launcher leaves out."""


@dataclass(frozen=True, slots=True)
class Family:
    """The variables of one kind of launcher; of several names the first that is set counts.

    ``nodes`` counts the machines of the job. ``example`` is how the launcher passes on
    ``MASTER_ADDR``.
    """

    name: str
    rank: str
    size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    nodes: str = ""
    example: str = "MASTER_ADDR=$(hostname) mpirun ..."


FAMILIES = (
    Family(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        example="MASTER_ADDR=$(hostname) mpirun -x MASTER_ADDR ...",
    ),
    Family(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Family(
        "Flux",
        "FLUX_TASK_RANK",
        ("FLUX_JOB_SIZE",),
        ("FLUX_TASK_LOCAL_ID",),
        nodes="FLUX_JOB_NNODES",
        example="flux run --env=MASTER_ADDR=NAME ...",
    ),
    Family(
        "LSF's jsrun",
        "JSM_NAMESPACE_RANK",
        ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
        example="jsrun -E MASTER_ADDR=NAME ...",
    ),
    Family(
        "PALS",
        "PALS_RANKID",
        ("PMI_SIZE",),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        example="mpiexec --env MASTER_ADDR=NAME ...",
    ),
    Family(
        "MPICH",
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        example="mpiexec -genv MASTER_ADDR NAME ...",
    ),
    Family("PMIx", "PMIX_RANK"),
)
"""Intel MPI speaks as MPICH does. What is inside of another comes first: PALS beside PMI."""


@dataclass(frozen=True, slots=True)
class Told:
    """The variables by which a launcher told this process something; ``""`` where it did not."""

    family: Family
    rank: str
    size: str
    local_rank: str
    local_size: str

    @property
    def whole(self) -> bool:
        """Whether it told everything but addresses."""
        return bool(self.size and self.local_rank and self.local_size)

    def alone(self, env: Mapping[str, str]) -> bool:
        """Whether it started this process only."""
        return bool(self.size) and env[self.size].strip() == "1"


def started(env: Mapping[str, str]) -> bool:
    """Whether such a launcher started this process; not ``srun``, which sets some of these too."""
    return _told(env) is not None


def speaks(env: Mapping[str, str]) -> bool:
    """Whether a launcher started this process beside others, and told all that we must know."""
    told = _told(env)
    return told is not None and told.whole and not told.alone(env)


def from_mpi(env: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster of so many workers; None outside of `speaks`.

    They meet at ``MASTER_ADDR`` and ``MASTER_PORT`` (29500), on one machine at its loopback.
    """
    told = _told(env)
    if told is None or not speaks(env):
        return None
    names = told.rank, told.size, told.local_rank, told.local_size
    rank, world, local_rank, local_size = (count(env, name) for name in names)
    meeting = address(_host(env, told.family, world, local_size), count(env, "MASTER_PORT", PORT))
    return ClusterSpec(
        addresses={"worker": (meeting, *[""] * (world - 1))},
        task=Task("worker", rank),
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_size=local_size,
        rendezvous=meeting,
        source=told.family.name,
    )


def check_told(env: Mapping[str, str]) -> None:
    """Raise `UserError` where a launcher says that we have a rank, but not enough to find others.

    For who has asked everybody else: the process would train alone, and so would its peers.
    """
    told = _told(env)
    if told is None or told.whole or told.alone(env):
        return
    if not told.size:
        raise UserError(
            f"{told.rank}={env[told.rank]} says that a launcher numbers its processes, but nothing "
            "says how many there are",
            f"Set RANK, WORLD_SIZE, {LOCAL_RANK}, {LOCAL_SIZE}, MASTER_ADDR and MASTER_PORT for "
            f"each, or unset {told.rank} if this process is alone.",
        )
    names = [LOCAL_SIZE] if told.local_rank else [LOCAL_RANK, LOCAL_SIZE]
    raise UserError(
        f"{told.rank}={env[told.rank]} and {told.size}={env[told.size]} say that this process has "
        "others beside it, but nothing says which of them share a machine",
        f"All on one: set MASTER_ADDR=127.0.0.1. On several: set {' and '.join(names)} for each, "
        "and MASTER_ADDR to the machine of process 0.",
    )


def _told(env: Mapping[str, str]) -> Told | None:
    """The first launcher that told everything, else the first that told a rank."""
    found = [told for family in FAMILIES if (told := _read(env, family))]
    chosen = next((told for told in found if told.whole or told.alone(env)), None)
    told = chosen or (found[0] if found else None)
    if told is None or srun.says(env, env[told.rank].strip(), env.get(told.size, "").strip()):
        return None
    return told


def _read(env: Mapping[str, str], family: Family) -> Told | None:
    """What ``family`` told; what it left out as the user says it, or one machine makes it clear."""
    rank, size = _set(env, family.rank), _set(env, *family.size)
    if not rank:
        return None
    local_rank = _set(env, *family.local_rank, LOCAL_RANK)
    local_size = _set(env, *family.local_size, LOCAL_SIZE)
    if env.get(family.nodes) == "1" or is_loopback(env.get("MASTER_ADDR", "").strip()):
        local_rank, local_size = local_rank or rank, local_size or size
    return Told(family, rank, size, local_rank, local_size)


def _set(env: Mapping[str, str], *names: str) -> str:
    """The first of ``names`` that is set, ``""`` where none is."""
    return next((name for name in names if env.get(name, "").strip()), "")


def _host(env: Mapping[str, str], family: Family, world: int, local: int) -> str:
    given = env.get("MASTER_ADDR", "").strip()
    if local >= world:
        return given or "127.0.0.1"
    if given and not is_loopback(given):
        return given
    what = f"MASTER_ADDR={given!r} means each machine itself" if given else "MASTER_ADDR is not set"
    raise UserError(
        f"{family.name} started {world} processes, {local} of them here, but {what}",
        f"Name the machine of the first process: {family.example}",
    )
