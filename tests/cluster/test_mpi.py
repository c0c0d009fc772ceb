from __future__ import annotations

import pytest

from spartito.cluster import ClusterSpec, Task
from spartito.cluster.mpi import from_mpi
from spartito.errors import UserError
from tests.cluster.environments import mpich, open_mpi


def test_on_one_machine_they_meet_at_its_loopback() -> None:
    assert from_mpi(open_mpi(2)) == ClusterSpec(
        addresses={"worker": ("127.0.0.1:29500", "", "", "")},
        task=Task("worker", 2),
        rank=2,
        num_replicas=4,
        local_rank=2,
        local_size=4,
        rendezvous="127.0.0.1:29500",
        source="Open MPI",
    )


def test_on_several_machines_they_meet_where_it_is_said() -> None:
    spec = from_mpi(open_mpi(2, machines=2) | {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "1234"})
    assert spec is not None
    assert spec.rendezvous == "[fe80::1]:1234"
    assert (spec.rank, spec.local_rank, spec.local_size) == (2, 0, 2)


@pytest.mark.parametrize("given", [{}, {"MASTER_ADDR": "localhost"}])
def test_on_several_machines_the_address_must_be_one_for_all(given: dict[str, str]) -> None:
    with pytest.raises(UserError, match="MASTER_ADDR") as error:
        from_mpi(open_mpi(2, machines=2) | given)
    assert "4 processes, 2 of them here" in str(error.value)
    assert "MASTER_ADDR=$(hostname)" in str(error.value)


def test_mpich_and_its_kin_say_it_in_other_words() -> None:
    spec = from_mpi(mpich(1))
    assert spec is not None
    assert (spec.rank, spec.num_replicas, spec.local_rank, spec.local_size) == (1, 2, 1, 2)
    assert spec.source == "MPICH"
    named = {f"MV2_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
    sizes = {f"MV2_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
    assert from_mpi(named | sizes) == spec.from_source("MVAPICH")


def test_without_others_it_says_nothing() -> None:
    assert from_mpi({}) is None
    alone = {name: "1" if "SIZE" in name else "0" for name in open_mpi(0) if "COMM" in name}
    assert from_mpi(alone) is None
    # srun --mpi=pmi2 sets these two, and says all the rest as Slurm.
    assert from_mpi({"PMI_RANK": "0", "PMI_SIZE": "2"}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMPI_COMM_WORLD_RANK", "4"),
        ("OMPI_COMM_WORLD_RANK", "x"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "7"),
        ("MASTER_PORT", "99999"),
    ],
)
def test_what_cannot_be_is_named(name: str, value: str) -> None:
    with pytest.raises(UserError, match=value):
        from_mpi(open_mpi(1) | {name: value})
