"""Groups for tensors of devices, over those of the host."""

from __future__ import annotations

import pytest

from tests.collectives import staged_jobs
from tests.replicas import Replicas
from tests.skips import shares_memory


@pytest.mark.parametrize(
    ("communication", "host"),
    [
        pytest.param("auto", "SharedMemoryCollective", marks=shares_memory),
        ("sockets", "SocketCollective"),
        ("process_group", "ProcessGroupCollective"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_operations_are_those_of_the_host(
    accelerators: Replicas, communication: str, host: str, world_size: int
) -> None:
    """Three tasks share two devices. Tensors of a device never reach a transport of the host."""
    found = accelerators(staged_jobs.operations, world_size, communication)
    for each in found:
        assert each["host"] == host
        assert each["there"] == each["here"]
        if communication != "process_group":  # which takes them to the host itself
            assert "a tensor on sim:" in each["refusal"]
    total = [sum(n + 10 * rank for rank in range(world_size)) for n in range(6)]
    assert found[0]["there"]["all_reduce"] == [[total[:3], total[3:]]]
    assert found[0]["there"]["broadcast"] == [[n + 10.0 * (world_size - 1) for n in range(3)]]
