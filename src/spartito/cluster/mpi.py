"""The cluster by the variables of ``mpirun`` and of other launchers that number processes.

Open MPI, MVAPICH, MPICH and Intel MPI, ``flux run``, LSF's ``jsrun``, HPE's PALS. They set ranks
but no addresses. What sets a rank and leaves out the rest is refused: to train alone beside the
others would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spartito.cluster import srun
from spartito.cluster.address_list import count, numbered
from spartito.cluster.spec import ClusterSpec
from spartito.errors import UserError
from spartito.wire.addresses import address, is_loopback

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
"""Intel MPI sets what MPICH does. What is inside of another comes first: PALS beside PMI."""


@dataclass(frozen=True, slots=True)
class Found:
    """The variables that a launcher set for this process; ``""`` where it did not."""

    family: Family
    rank: str
    size: str
    local_rank: str
    local_size: str

    @property
    def whole(self) -> bool:
        """Whether it set everything but addresses."""
        return bool(self.size and self.local_rank and self.local_size)

    def alone(self, env: Mapping[str, str]) -> bool:
        """Whether it started this process only."""
        return bool(self.size) and env[self.size].strip() == "1"


def started(env: Mapping[str, str]) -> bool:
    """Whether such a launcher started this process; not ``srun``, which sets some of these too."""
    return _found(env) is not None


def applies(env: Mapping[str, str]) -> bool:
    """Whether a launcher started this process beside others, and set all that we must know."""
    found = _found(env)
    return found is not None and found.whole and not found.alone(env)


def from_mpi(env: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster of so many workers; None outside of `applies`.

    They meet at ``MASTER_ADDR`` and ``MASTER_PORT`` (29500), on one machine at its loopback.
    """
    found = _found(env)
    if found is None or not applies(env):
        return None
    names = found.rank, found.size, found.local_rank, found.local_size
    rank, world, local_rank, local_size = (count(env, name) for name in names)
    meeting = address(_host(env, found.family, world, local_size), count(env, "MASTER_PORT", PORT))
    return numbered(rank, world, local_rank, local_size, meeting, found.family.name)


def check_complete(env: Mapping[str, str]) -> None:
    """Raise `UserError` where a launcher says that we have a rank, but not enough to find others.

    For who has asked everybody else: the process would train alone, and so would its peers.
    """
    found = _found(env)
    if found is None or found.whole or found.alone(env):
        return
    if not found.size:
        raise UserError(
            f"{found.rank}={env[found.rank]} says that a launcher numbers its processes, but "
            "nothing says how many there are",
            f"Set RANK, WORLD_SIZE, {LOCAL_RANK}, {LOCAL_SIZE}, MASTER_ADDR and MASTER_PORT for "
            f"each, or unset {found.rank} if this process is alone.",
        )
    names = [LOCAL_SIZE] if found.local_rank else [LOCAL_RANK, LOCAL_SIZE]
    raise UserError(
        f"{found.rank}={env[found.rank]} and {found.size}={env[found.size]} say that this process "
        "has others beside it, but nothing says which of them share a machine",
        f"All on one: set MASTER_ADDR=127.0.0.1. On several: set {' and '.join(names)} for each, "
        "and MASTER_ADDR to the machine of process 0.",
    )


def _found(env: Mapping[str, str]) -> Found | None:
    """The first launcher that set everything, else the first that set a rank."""
    set_ = [each for family in FAMILIES if (each := _read(env, family))]
    whole = next((each for each in set_ if each.whole or each.alone(env)), None)
    found = whole or (set_[0] if set_ else None)
    if found is None or srun.says(env, env[found.rank].strip(), env.get(found.size, "").strip()):
        return None
    return found


def _read(env: Mapping[str, str], family: Family) -> Found | None:
    """What ``family`` set; what it left out as the user says, or as one machine makes clear."""
    rank, size = _set(env, family.rank), _set(env, *family.size)
    if not rank:
        return None
    local_rank = _set(env, *family.local_rank, LOCAL_RANK)
    local_size = _set(env, *family.local_size, LOCAL_SIZE)
    if env.get(family.nodes) == "1" or is_loopback(env.get("MASTER_ADDR", "").strip()):
        local_rank, local_size = local_rank or rank, local_size or size
    return Found(family, rank, size, local_rank, local_size)


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
