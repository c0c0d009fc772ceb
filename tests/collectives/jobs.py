"""What the tests of the collectives run in their processes."""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spartito.collectives.collective import Collective
from spartito.collectives.hierarchical import HierarchicalCollective
from spartito.collectives.membership.placement import Placement
from spartito.collectives.membership.rendezvous import connect
from spartito.collectives.membership.store import Membership
from spartito.collectives.membership.torch_store import OfTorch
from spartito.collectives.memory.shared_memory import SharedMemoryCollective
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.collectives.sockets.tcp import SocketCollective
from spartito.errors import TaskLostError
from spartito.launch.lines.network import Machine
from spartito.notes import logger
from spartito.ps.protocol.messages import Lost
from spartito.wire.frames import Wire
from tests.collectives.group import join, spec

LONG = 60.0  # seconds that no passing test comes near


def tells_its_machine(pipe: Connection, rank: int, world_size: int, port: int, way: str) -> bool:
    """Whether what moves between the machines is told inside of ours."""
    collective = join(rank, world_size, port, 30, way)
    assert isinstance(collective, HierarchicalCollective)
    told = collective.between.moved == collective.inside.heartbeat
    collective.barrier()
    collective.close()
    return told


def slow_leader(pipe: Connection, rank: int, world_size: int, port: int, limit: float) -> bool:
    """Meet long after the limit, until when rank 0 says all the time that it gets on."""
    collective = join(rank, world_size, port, LONG, "auto")
    assert isinstance(collective, SharedMemoryCollective)
    limit_to(collective, limit)
    end = time.monotonic() + 1.5 * limit
    while rank == 0 and time.monotonic() < end:
        collective.heartbeat()
        time.sleep(0.01)
    collective.synchronize()
    collective.close()
    return True


def limit_to(group: Collective, seconds: float) -> None:
    """End waits after ``seconds`` from now on; the others had longer to come."""
    if isinstance(group, HierarchicalCollective):
        limit_to(group.inside, seconds)
        limit_to(group.between, seconds)
    elif isinstance(group, SharedMemoryCollective):
        group.timeout = seconds
    elif isinstance(group, SocketCollective | ProcessGroupCollective):
        members = group._liveness._group
        assert members is not None
        group._liveness._group = replace(members, timeout=seconds)
        if isinstance(group, SocketCollective):
            group.timeout = seconds
        else:
            gloo = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
            gloo._set_default_timeout(timedelta(seconds=seconds))


def wait_for_others(
    pipe: Connection,
    rank: int,
    world_size: int,
    port: int,
    limit: float,
    communication: str,
    by: str = "all_reduce",
) -> Any:
    """All meet once; then, within ``limit``, each meets the others again when the test tells it."""
    return meet_twice(pipe, join(rank, world_size, port, LONG, communication), limit, by)


def wait_with_a_child(pipe: Connection, rank: int, port: int, communication: str) -> Any:
    """As `wait_for_others`, in a process that has forked one, which stays until its end is told.

    Sends its process id first.
    """
    group = join(rank, 2, port, LONG, communication)
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    pipe.send_bytes(pickle.dumps(child))
    return meet_twice(pipe, group, LONG, "all_reduce")


def wire_with_a_child(pipe: Connection, rank: int, port: int) -> None:
    """Connect a `Wire`, fork a process that stays, send its process id, and wait for the end."""
    wire = Wire(socket.create_connection(("127.0.0.1", port)), Lost)
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    pipe.send_bytes(pickle.dumps(child))
    wire.receive()


def wait_on_machines(
    pipe: Connection, rank: int, machines: Sequence[Machine], port: int, limit: float
) -> Any:
    """As `wait_for_others`, two ranks on each machine."""
    here = machines[rank // 2]
    enter(here)
    cluster = replace(
        spec(rank, 2 * len(machines), port),
        local_rank=rank % 2,
        local_size=2,
        rendezvous=f"{machines[0].address}:{port}",
    )
    group = connect(cluster, torch.device("cpu"), LONG)
    assert isinstance(group, HierarchicalCollective)
    return meet_twice(pipe, group, limit, "all_reduce")


def enter(machine: Machine) -> None:
    """Go there with this process, which has only one thread yet."""
    libc = ctypes.CDLL(None, use_errno=True)
    with ExitStack() as stack:
        spaces = [
            stack.enter_context(open(f"/proc/{machine.holder}/ns/{kind}"))
            for kind in ("net", "ipc", "mnt")
        ]
        for space in spaces:
            if libc.setns(space.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"no way into {space.name}")


def meet_twice(pipe: Connection, group: Collective, limit: float, by: str) -> Any:
    """All meet by a call, and once more when the test tells it: then ``limit`` holds."""
    reducer = group.reducer(3, torch.float32, torch.device("cpu"))
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(torch.ones(3)),
        "all_gather": lambda: group.all_gather(torch.ones(3)),
        "broadcast": lambda: group.broadcast(torch.ones(3), group.world_size - 1),
        "barrier": group.barrier,
        "reducer": lambda: reducer.reduce((1.0,), 1.0),
    }
    calls[by]()
    limit_to(group, limit)
    pipe.send("together")
    pipe.recv()
    start = time.monotonic()
    try:
        calls[by]()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        group.close()
    return "met"


def freeze_halfway(
    pipe: Connection, rank: int, world_size: int, port: int, limit: float, way: str
) -> Any:
    """The last rank joins its part with those of its machine, and freezes before the result."""
    group = join(rank, world_size, port, LONG, way)
    assert isinstance(group, HierarchicalCollective)
    limit_to(group, limit)
    pipe.send("together")
    pipe.recv()
    if rank == world_size - 1:
        group.inside.all_reduce(torch.ones(3))
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        for _ in range(2):  # whose machine does not wait for its result misses it in the next
            group.all_reduce(torch.ones(3))
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        group.close()
    return "met"


def kind_of_group(_: Connection, rank: int, world_size: int, port: int, way: str) -> str:
    """Which collective the ranks have found."""
    group = join(rank, world_size, port, 20, way)
    group.close()
    return type(group).__name__


def traffic_of_a_step(
    _: Connection, rank: int, world_size: int, port: int, way: str, numel: int
) -> int:
    """The bytes that a rank sends for one reduction with two piggybacked scalars."""
    group = join(rank, world_size, port, 20, way)
    reducer = group.reducer(numel, torch.float32, torch.device("cpu"))
    before = group.traffic.sent
    reducer.reduce((1.0, 0.0), float(world_size))
    sent = group.traffic.sent - before
    assert group.traffic.received >= sent
    group.close()
    return sent


def leaders_do_not_meet(_: Connection, rank: int, world_size: int, port: int) -> Any:
    """One machine of several, whose leader does not find the others."""
    group = group_at(rank, world_size, port)
    assert group.under("here").missing() == []
    inside = SharedMemoryCollective(group)

    def refuse() -> Collective:
        raise TaskLostError("worker 9 did not come", "Start it.")

    placement = Placement((tuple(range(world_size)), (world_size,)))
    HierarchicalCollective(rank, group.names, placement, inside, refuse)


def _reduced(group: Collective, *sizes: int) -> object:
    reducers = [group.reducer(size, torch.float32, torch.device("cpu")) for size in sizes]
    return reducers[-1].reduce((1.0, 2.0), 1.0)


def _of_two(group: Collective, which: int) -> object:
    reducers = [group.reducer(4, torch.float32, torch.device("cpu")) for _ in range(2)]
    return reducers[which].reduce((1.0,), 1.0)


def _for(group: Collective, purpose: str) -> object:
    with group.current_call.during(purpose):
        return group.all_reduce(torch.ones(4))


Act = Callable[[Collective], object]
MISMATCHES: list[tuple[Act, Act, str, str]] = [
    (
        lambda group: group.all_gather(torch.ones(3)),
        lambda group: group.all_reduce(torch.ones(300_000)),
        "all_gather of 3 float32",
        "all_reduce of 300000 float32",
    ),
    (
        lambda group: group.all_reduce(torch.ones(3)),
        lambda group: group.all_reduce(torch.ones(3).double()),
        "all_reduce of 3 float32",
        "all_reduce of 3 float64",
    ),
    (
        lambda group: group.all_reduce(torch.ones(0)),
        lambda group: group.all_reduce(torch.ones(3)),
        "all_reduce of 0 float32",
        "all_reduce of 3 float32",
    ),
    (
        lambda group: group.broadcast(torch.ones(3), 0),
        lambda group: group.broadcast(torch.ones(3), 1),
        "broadcast of 3 float32",
        "broadcast of 3 float32 from rank 1",
    ),
    (
        lambda group: group.barrier(),
        lambda group: group.all_gather_bytes(b"abc"),
        "barrier",
        "gather of bytes",
    ),
    (
        lambda group: _reduced(group, 1000),
        lambda group: _reduced(group, 1001),
        "reduce of 1000 float32",
        "reduce of 1001 float32",
    ),
    (
        lambda group: _of_two(group, 0),
        lambda group: _of_two(group, 1),
        "reduce of 4 float32",
        "reduce of 4 float32 by reducer 1",
    ),
    (
        lambda group: _for(group, "evaluate"),
        lambda group: _for(group, "step"),
        "all_reduce of 4 float32 [evaluate]",
        "all_reduce of 4 float32 [step]",
    ),
]


def mismatched_calls(
    _: Connection, rank: int, world_size: int, ports: Sequence[int], way: str
) -> list[tuple[str, str]]:
    """What comes of rank 0 being at one call of `MISMATCHES`, and the others at the other."""
    found = []
    for (chiefs, others, *_names), port in zip(MISMATCHES, ports, strict=True):
        group = join(rank, world_size, port, 60, way)
        for _turn in range(2):
            group.barrier()
        try:
            (others if rank else chiefs)(group)
            found.append(("nothing", ""))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        finally:
            group.close()
    return found


def make_reducer(pipe: Connection, rank: int, world_size: int, port: int) -> Any:
    """Ask for a reducer when told."""
    group = join(rank, world_size, port, 20, "auto")
    pipe.send("together")
    pipe.recv()
    group.reducer(100, torch.float32, torch.device("cpu"))
    return "made"


def raise_after_joining(_: Connection, rank: int, world_size: int, port: int) -> Any:
    """The last rank raises; the others wait for it."""
    group = join(rank, world_size, port, 20, "auto")
    group.reducer(1000, torch.float32, torch.device("cpu"))
    if rank == world_size - 1:
        raise ValueError("my own")
    group.barrier()
    return "met"


def only_join(_: Connection, rank: int, world_size: int, port: int, limit: float) -> Any:
    """Come to the rendezvous."""
    join(rank, world_size, port, limit, "auto").close()
    return "joined"


def join_with_a_secret(_: Connection, rank: int, port: int, limit: float) -> Any:
    """Come to the rendezvous with a secret that no other task has."""
    os.environ["SPARTITO_SECRET"] = f"the secret of rank {rank}"
    join(rank, 2, port, limit, "auto").close()
    return "joined"


def come_as_rank_1(_: Connection, _number: int, world_size: int, port: int, limit: float) -> str:
    """Come to the rendezvous where another process is rank 1."""
    join(1, world_size, port, limit, "sockets").close()
    return "joined"


def group_at(rank: int, world_size: int, port: int) -> Membership:
    """A group on this machine, with its store."""
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=20),
    )
    return Membership(rank, [f"worker {r}" for r in range(world_size)], OfTorch(store), 20)


def join_in(
    _: Connection, rank: int, world_size: int, port: int, directories: list[str], reducer: int
) -> Any:
    """Shared memory in given directories, then a reducer of so many bytes."""
    members = group_at(rank, world_size, port)
    missing = members.under("here").missing()
    assert rank or not missing  # rank 0, which keeps the store, may be gone as soon as we are here
    group = SharedMemoryCollective(members, directories=[Path(d) for d in directories])
    where = Path(
        os.readlink("/proc/self/fd/" + str(group.memory._lives._files[group.rank])).split(" ")[0]
    ).parent
    if reducer:
        group.reducer(reducer, torch.uint8, torch.device("cpu"))
    result = [float(part) for part in group.all_gather(torch.tensor(float(rank)))]
    group.close()
    return str(where), result


def tell_notes(pipe: Connection, rank: int, world_size: int, port: int, way: str) -> None:
    """Send "together" once all have met; then meet again, and send what is said meanwhile."""
    logger.handlers = [sender := Sender(pipe)]
    sender.addFilter(lambda record: "exchange by sockets" not in record.msg)
    collective = join(rank, world_size, port, LONG, way)
    pipe.send_bytes(pickle.dumps("together"))
    pipe.recv()
    collective.all_reduce(torch.ones(3))
    collective.close()


class Sender(logging.Handler):
    """Sends each line of the log to the test."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self._pipe.send_bytes(pickle.dumps(record.getMessage()))
