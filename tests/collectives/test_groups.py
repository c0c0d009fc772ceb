"""Named groups of some tasks: four processes as a mesh of 2 x 2, in double precision."""

from __future__ import annotations

import re
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from spartito.collectives.collective import Collective
from spartito.collectives.membership.rendezvous import Rendezvous
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.collectives.sockets.tcp import SocketCollective
from spartito.errors import MismatchedCallsError, TaskLostError, UserError
from tests.collectives.group import rendezvous, running, spec
from tests.commands import free_port

CPU = torch.device("cpu")
LONG = 60.0  # a limit that no passing test comes near


def mesh(rank: int) -> dict[str, list[int]]:
    """The groups of ``rank``: its row, which computes on one data shard, and its column."""
    row = rank // 2 * 2
    return {"model": [row, row + 1], "data": [rank % 2, rank % 2 + 2]}


def part(rank: int, turn: int) -> Tensor:
    """More than a slot of shared memory; the sums are exact in any order."""
    generator = torch.Generator().manual_seed(10 * turn + rank)
    return torch.randint(-(1 << 40), 1 << 40, (2, 100_001), generator=generator).double() / 1024


def sums_of_groups(_: Connection, rank: int, port: int, way: str) -> list[str]:
    """What groups return that differs from plain torch."""
    wrong: list[str] = []

    def check(what: str, got: Tensor, expected: Tensor) -> None:
        if got.dtype != expected.dtype or not torch.equal(got, expected):
            wrong.append(what)

    with rendezvous(rank, 4, port, LONG, way) as meeting:
        groups = {"world": meeting.group()}
        groups |= {name: meeting.group(name, ranks) for name, ranks in mesh(rank).items()}
        reducers = {name: group.reducer(5, torch.float64, CPU) for name, group in groups.items()}
        for turn in range(2):  # in turn: no group may disturb another
            for name, group in groups.items():
                _exchange(group, reducers[name], turn, check)
        if groups["data"] is not meeting.group("data", mesh(rank)["data"]):
            wrong.append("made again")
        with groups["world"].current_call.during("step"):
            if not groups["model"].current_call.purpose:
                wrong.append("no purpose")
        groups["world"].barrier()
    return wrong


def _rows(tensor: Tensor, count: int) -> Tensor:
    """So many rows of its elements, for each rank one."""
    return tensor.view(-1)[: tensor.numel() // count * count].view(count, -1)


def _exchange(group: Collective, reducer: Any, turn: int, check: Any) -> None:
    case, mine = f"{group.name} {turn}", group.ranks[group.rank]
    parts = [part(rank, turn) for rank in group.ranks]
    check(f"all_reduce {case}", group.all_reduce(part(mine, turn)), sum(parts[1:], parts[0]))
    for got, expected in zip(group.all_gather(parts[group.rank]), parts, strict=True):
        check(f"all_gather {case}", got, expected)
    for source in range(group.world_size):
        check(f"broadcast {case}", group.broadcast(part(mine, turn), source), parts[source])
    whole = torch.empty(group.world_size, parts[0].numel(), dtype=torch.float64)
    group.all_gather_into(whole, parts[group.rank].view(-1))
    check(f"all_gather_into {case}", whole, torch.stack([each.view(-1) for each in parts]))
    ours = [_rows(each, group.world_size) for each in parts]
    own = [each[group.rank] for each in ours]
    check(f"all_to_all {case}", group.all_to_all(ours[group.rank].clone()), torch.stack(own))
    summed = group.reduce_scatter(ours[group.rank].clone())
    check(f"reduce_scatter {case}", summed, sum(own[1:], own[0]))
    if isinstance(group, SocketCollective | ProcessGroupCollective):
        for tag in (1, 0):  # both are under way, and are taken the other way round
            group.send(parts[group.rank] + tag, (group.rank + 1) % group.world_size, tag)
        before = group.rank - 1
        for tag in (0, 1):
            came = torch.empty_like(parts[0])
            group.receive(came, before % group.world_size, tag)
            check(f"message {tag} {case}", came, parts[before] + tag)
    rows = [torch.full((rank, 3), float(rank)) for rank in group.ranks]
    for got, expected in zip(group.all_gather_rows(rows[group.rank]), rows, strict=True):
        check(f"rows {case}", got, expected)
    weights = [float(rank + 1) for rank in group.ranks]
    short = [each[0, :5] for each in parts]
    reducer.input.copy_(short[group.rank])
    total = reducer.reduce((weights[group.rank], 1.0), 2 * sum(weights))
    check(f"reducer {case}", reducer.output, 2 * sum(short[1:], short[0]))
    expected = torch.tensor((sum(weights), float(group.world_size)))
    check(f"piggybacked {case}", torch.tensor(total), expected)


@pytest.mark.parametrize("way", ["auto", "sockets", "process_group", "on aabb", "on aaab"])
def test_groups_of_a_mesh_compute_on_their_own(way: str) -> None:
    """On "aabb" rows share memory and columns do not; on "aaab" one group has two machines."""
    port = free_port()
    with running() as group:
        for rank in range(4):
            group.start(rank, sums_of_groups, port, way)
        assert [group.result(rank) for rank in range(4)] == [[]] * 4


def wrong_calls(pipe: Connection, rank: int, port: int, way: str) -> Any:
    """Rank 3 is at another call than rank 2 of its row; then it is killed."""
    with rendezvous(rank, 4, port, LONG, way) as meeting:
        row, column = (meeting.group(name, ranks) for name, ranks in mesh(rank).items())
        try:
            row.barrier() if rank == 3 else row.all_reduce(torch.ones(3))
            found = "met"
        except MismatchedCallsError as error:
            found = str(error)
        column.barrier()
        pipe.send("together")
        pipe.recv()
        try:
            column.barrier()
        except TaskLostError as error:
            return found, str(error)
        return found, "met"


@pytest.mark.parametrize("way", ["auto", "sockets", "process_group"])
def test_errors_name_the_tasks_of_the_group(way: str) -> None:
    port = free_port()
    with running() as group:
        for rank in range(4):
            group.start(rank, wrong_calls, port, way)
        assert [group.result(rank) for rank in range(4)] == ["together"] * 4
        group.signal(3, signal.SIGKILL)
        results = {}
        for rank in (1, 0, 2):  # rank 0 keeps the store
            group.tell(rank)
            if rank != 0:
                results[rank] = group.result(rank)
        results[0] = group.result(0)
    calls = "worker 2 is at all_reduce of 3 float32, worker 3 at barrier"
    assert results[0] == ("met", "met")
    assert calls in results[2][0]
    assert results[2][1] == "met"
    assert results[1][0] == "met"
    assert re.match("worker 3 is gone(:| or did not come)", results[1][1])


def test_a_rendezvous_that_is_made_connects_to_nobody() -> None:
    """The address is none of this machine, and no other task exists."""
    meeting = Rendezvous(spec(1, 2, free_port()), CPU, LONG)
    meeting.close()
    alone = Rendezvous(spec(0, 1, free_port()), CPU)
    assert alone.group("data", [0]).world_size == 1


@pytest.mark.parametrize(
    ("name", "ranks", "rule"),
    [
        ("data", [0, 2], "asks for the groups that it is in"),
        ("data", [1, 9], "of ranks that the job has"),
        ("data", [], "asks for the groups that it is in"),
        ("world", [0, 1], r"has the ranks \[0, 1, 2, 3\], and now is to have \[0, 1\]"),
    ],
)
def test_groups_that_cannot_be_are_refused(name: str, ranks: list[int], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        Rendezvous(spec(1, 4, free_port()), CPU, LONG).group(name, ranks)
