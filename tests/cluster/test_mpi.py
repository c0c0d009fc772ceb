from __future__ import annotations

from dataclasses import replace

import pytest

from spartito.cluster import ClusterSpec, Task, resolve
from spartito.cluster.mpi import check_complete, from_mpi
from spartito.cluster.resolver import joined
from spartito.errors import UserError
from tests.cluster.environments import (
    SRUN_SHELL,
    flux,
    hydra_alone,
    jsrun,
    mpich,
    open_mpi,
    pals,
    srun,
    without,
)
from tests.cluster.orchestrated import TORCHRUN


def test_on_one_machine_they_meet_at_its_loopback() -> None:
    assert from_mpi(open_mpi(2)) == ClusterSpec(
        addresses={"worker": ("127.0.0.1:29500", "", "", "")},
        task=Task("worker", 2),
        rank=2,
        world_size=4,
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
    assert (spec.rank, spec.world_size, spec.local_rank, spec.local_size) == (1, 2, 1, 2)
    assert spec.source == "MPICH"
    named = {f"MV2_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
    sizes = {f"MV2_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
    assert from_mpi(named | sizes) == replace(spec, source="MVAPICH")


def test_without_others_it_says_nothing() -> None:
    assert from_mpi({}) is None
    alone = {name: "1" if "SIZE" in name else "0" for name in open_mpi(0) if "COMM" in name}
    assert from_mpi(alone) is None
    for env in ({"PMI_RANK": "0", "PMI_SIZE": "1"}, {"PMIX_RANK": "0", **alone}):
        assert from_mpi(env) is None
        check_complete(env)


@pytest.mark.parametrize(
    ("source", "env"),
    [
        ("Flux", flux(3, machines=2) | {"LOCAL_WORLD_SIZE": "2"}),
        ("LSF's jsrun", jsrun(3)),
        ("PALS", pals(3)),
        ("MPICH", without(pals(3), "PALS_RANKID")),
    ],
)
def test_other_launchers_are_understood(source: str, env: dict[str, str]) -> None:
    spec = from_mpi(env | {"MASTER_ADDR": "node1"})
    assert spec is not None
    assert (spec.source, spec.rendezvous) == (source, "node1:29500")
    assert (spec.rank, spec.world_size, spec.local_rank, spec.local_size) == (3, 4, 1, 2)
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        from_mpi(env)


@pytest.mark.parametrize("env", [flux(1), hydra_alone(1) | {"MASTER_ADDR": "127.0.0.1"}])
def test_one_machine_needs_no_numbers_of_its_own(env: dict[str, str]) -> None:
    spec = from_mpi(env)
    assert spec is not None
    assert (spec.rank, spec.local_rank) == (1, 1)
    assert spec.world_size == spec.local_size
    assert spec.rendezvous == "127.0.0.1:29500"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (hydra_alone(1), ["PMI_RANK=1", "PMI_SIZE=2", "LOCAL_RANK and LOCAL_WORLD_SIZE"]),
        (flux(3, machines=2), ["FLUX_TASK_RANK=3", "set LOCAL_WORLD_SIZE for each"]),
        ({"PMIX_RANK": "0"}, ["PMIX_RANK=0", "how many", "WORLD_SIZE", "unset PMIX_RANK"]),
        ({"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "2"}, ["PALS_RANKID=1", "how many"]),
    ],
)
def test_a_rank_that_does_not_lead_to_the_others_is_no_reason_to_train_alone(
    env: dict[str, str], words: list[str]
) -> None:
    for ask in (resolve, joined):
        with pytest.raises(UserError) as error:
            ask(env)
        assert all(word in str(error.value) for word in words), str(error.value)
    assert resolve(env | TORCHRUN).source == "torchrun's variables"


@pytest.mark.parametrize(
    "told",
    [
        {"PMI_RANK": "3", "PMI_SIZE": "4"},
        {"PMIX_RANK": "3"},
        without(pals(3), "PALS_LOCAL_SIZE"),
    ],
    ids=["--mpi=pmi2", "--mpi=pmix", "--mpi=cray_shasta"],
)
def test_what_srun_sets_for_mpi_is_slurms(told: dict[str, str]) -> None:
    assert resolve(srun(3) | told) == resolve(srun(3))
    typed = SRUN_SHELL | {name: "0" if "RANK" in name else v for name, v in told.items()}
    assert resolve(typed) == ClusterSpec.alone()


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
