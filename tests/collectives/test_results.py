"""Every collective gives the same results, and the same bits on all ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spartito.collectives.collective import IdentityCollective, add_piggybacked
from tests.collectives import result_jobs
from tests.collectives.group import running
from tests.commands import free_port, free_ports


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_all_collectives_agree(world_size: int) -> None:
    ways = list(zip(("auto", "process_group", "sockets"), free_ports(3), strict=True))
    with running() as group:
        for rank in range(world_size):
            group.start(rank, result_jobs.wrong_results, world_size, ways)
        for rank in range(world_size):
            assert group.result(rank) == []


@pytest.mark.parametrize("communication", ["auto", "process_group", "sockets"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_get_the_same_bits(communication: str, world_size: int) -> None:
    port = free_port()
    with running() as group:
        for rank in range(world_size):
            group.start(rank, result_jobs.random_sums, world_size, port, communication)
        first, *others = [group.result(rank) for rank in range(world_size)]
        total, mean, parts = first
        exact = torch.stack(parts).double().sum(0)
        torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(mean.double(), exact / 3 / world_size, rtol=1e-5, atol=1e-3)
        for other in others:
            assert torch.equal(other[0], total)
            assert torch.equal(other[1], mean)


def test_one_replica_hears_itself() -> None:
    alone = IdentityCollective()
    tensor = torch.arange(6.0).view(2, 3)
    assert alone.all_reduce(tensor) is tensor
    assert alone.broadcast(tensor) is tensor
    (copy,) = alone.all_gather(tensor)
    assert torch.equal(copy, tensor)
    copy.zero_()
    assert tensor.sum() == 15
    assert alone.all_gather_bytes(b"abc") == [b"abc"]
    assert alone.all_gather_bytes(b"") == [b""]
    assert [part.shape for part in alone.all_gather_rows(tensor[:0])] == [(0, 3)]
    alone.barrier()
    reducer = alone.reducer(4, torch.float64, torch.device("cpu"))
    reducer.input.fill_(3)
    assert reducer.reduce((6.0, 1.0), 2.0) == (6.0, 1.0)
    assert reducer.output.tolist() == [1.0] * 4
    reducer.reduce((0.0,), 2.0)
    assert reducer.output.tolist() == [1.0] * 4
    alone.close()


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1))
def test_piggybacked_scalars_add_up(parts: list[tuple[int, int]]) -> None:
    assert add_piggybacked(parts) == (sum(a for a, _ in parts), sum(b for _, b in parts))
