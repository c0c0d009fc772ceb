"""Groups that work on devices: what the host has to know goes by a group of the host beside."""

from __future__ import annotations

import pytest

from spartito.system import shares_memory
from tests.collectives import device_jobs
from tests.replicas import ReplicaError, Replicas


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_memory_has_its_own_way(accelerator_groups: Replicas, world_size: int) -> None:
    """Tensors of the host touch no device, and those of a device are not waited for."""
    for found in accelerator_groups(device_jobs.operations, world_size):
        assert found["there"] == found["here"]
        assert found["touched"] == found["read"] == 0
        assert found["host"] == f"{'SharedMemory' if shares_memory() else 'Socket'}Collective"


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_only_a_device_knows_is_added_up_there(
    accelerator_groups: Replicas, world_size: int
) -> None:
    total = sum(range(world_size))
    for sums, reads, kept in accelerator_groups(device_jobs.scalars, world_size):
        assert sums == [total, total, total + 0.5]
        assert kept == [False, True, True]
        assert reads == 0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("size", "all_reduce of 4 float32"),
        ("operation", "all_gather of 3 float32"),
        ("device", "all_reduce of 3 float32 of the CPU"),
    ],
)
def test_calls_that_do_not_match_are_named_on_all(
    accelerator_groups: Replicas, kind: str, said: str
) -> None:
    for found in accelerator_groups(device_jobs.mismatched, 3, kind):
        assert found.startswith("MismatchedCallsError")
        assert said in found


@pytest.mark.parametrize("victim", [0, 2])
def test_who_is_lost_is_named(accelerator_groups: Replicas, victim: int) -> None:
    outcomes = accelerator_groups.outcomes(device_jobs.lost, 3, victim)
    for rank, found in enumerate(outcomes):
        if rank == victim:
            assert isinstance(found, ReplicaError)
        else:
            assert found.startswith(f"TaskLostError: worker {victim} ")
            assert "is gone" in found
