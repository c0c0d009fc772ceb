"""Memory that others see late: the fences of the groups on one machine stand where they must."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spartito.backend.machine import OneMachine
from spartito.collectives.membership.store import Membership
from spartito.collectives.membership.torch_store import OfTorch
from spartito.collectives.memory.shared_memory import SharedMemoryCollective
from spartito.errors import TaskLostError
from tests.collectives import weak_memory
from tests.collectives.group import running
from tests.commands import free_port
from tests.skips import shares_memory

TURNS = 6
LIMIT = 20.0
LARGE = 5000  # numbers of a row that goes in parts, or in slices


def part(rank: int, turn: int, numel: int = 48) -> Tensor:
    """Sums of them are exact in any order."""
    generator = torch.Generator().manual_seed(10 * turn + rank)
    return torch.randint(-(1 << 20), 1 << 20, (numel,), generator=generator).double()


def exchanged(group: SharedMemoryCollective, turn: int, reducer: Any) -> list[tuple[Tensor, Any]]:
    """What a group gave in a turn, and what it was to give."""
    rank, size = group.rank, group.world_size
    parts = [part(each, turn) for each in range(size)]
    total, rows = sum(parts[1:], parts[0]), [each.view(size, -1) for each in parts]
    large = [part(each, turn, LARGE) for each in range(size)]
    reducer.input.copy_(parts[rank])
    scalars = reducer.reduce((float(rank + turn), 1.0), size)
    return [
        (reducer.output * (scalars[0] / size if scalars[0] else 1.0), total),
        (torch.tensor(scalars), torch.tensor([size * turn + size * (size - 1) / 2, size])),
        (group.all_reduce(parts[rank].clone()), total),
        (torch.stack(group.all_gather(parts[rank])), torch.stack(parts)),
        (group.all_reduce(large[rank].clone()), sum(large)),
        (group.broadcast(parts[rank].clone(), turn % size), parts[turn % size]),
        (group.reduce_scatter(rows[rank]), sum(each[rank] for each in rows)),
        (group.all_to_all(rows[rank]), torch.stack([each[rank] for each in rows])),
    ]


def posted(machine: OneMachine, turn: int) -> list[tuple[Tensor, Tensor]]:
    """As `exchanged`, of messages around a ring, of which some come later than others."""
    rank, size = machine.rank, machine.size
    machine.begin(0)
    for tag in (0, 1):
        machine.send(part(rank, turn + tag), (rank + 1) % size, tag)
    found = []
    for tag in (1, 0):
        got, source = torch.zeros(48, dtype=torch.float64), (rank - 1) % size
        machine.receive(got, source, tag).wait()
        found.append((got, part(source, turn + tag)))
    return found


def hears(group: SharedMemoryCollective) -> bool:
    """Whether the others hear the last words of the first."""
    if group.rank == 0:
        group.memory.leave(TaskLostError("worker 0 gives up"))
        return True
    with pytest.raises(TaskLostError, match="worker 0 gives up"):
        group.barrier()
    return True


def wrong(rank: int, size: int, store: dist.Store, case: str) -> Any:
    """How many results were not what they were to be, in all turns or until the first error."""
    weak_memory.forget()
    weak_memory.stand()
    names = [f"worker {each}" for each in range(size)]
    group = Membership(rank, names, OfTorch(store), LIMIT).under(case or "whole")
    shared = machine = None
    found = 0
    try:
        shared = SharedMemoryCollective(group.under("shared"))
        reducer = shared.reducer(48, torch.float64, torch.device("cpu"))
        machine = OneMachine(group.under("messages"), spins=False)
        weak_memory.weaken(machine._mail)
        weak_memory.stand(without=case)
        for turn in range(TURNS):
            results = exchanged(shared, turn, reducer)
            if not case:  # a message whose tag nobody sees is waited for until the limit
                results += posted(machine, turn)
            found += sum(not torch.allclose(got, wanted) for got, wanted in results)
            if case and found:
                break
        if not case:
            found += not hears(shared)
    except Exception:
        if not case:
            raise
        found += 1
    finally:
        for one in (shared, machine):
            if one is not None:
                one.close()
    return found, dict(weak_memory.counts)


def job(_: Connection, rank: int, size: int, port: int, cases: list[str]) -> list[Any]:
    weak_memory.install()
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    found = [wrong(rank, size, store, case) for case in cases]
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < size:  # it keeps the store
        pass
    return found


def outcomes(size: int, cases: list[str]) -> list[Any]:
    """Of each case: how many results were wrong in all ranks, and the fences of the first."""
    port = free_port()
    with running() as group:
        for rank in range(size):
            group.start(rank, job, size, port, cases)
        found = [group.result(rank) for rank in range(size)]
    return [(sum(count for count, _ in of), of[0][1]) for of in zip(*found, strict=True)]


@shares_memory
@pytest.mark.parametrize("size", [2, 3])
def test_fences_stand_where_memory_needs_them(size: int) -> None:
    whole, unpublished, old = outcomes(size, ["", "release", "acquire"])
    assert whole[0] == 0
    assert min(whole[1].values()) > TURNS
    assert unpublished[0] > 0
    assert old[0] > 0
