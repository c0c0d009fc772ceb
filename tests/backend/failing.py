"""What ranks do in tests in which one of them ends, stops, or does something else than the rest."""

from __future__ import annotations

import os
import pickle
import signal
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import current_process
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from spartito.collectives.membership import versions
from tests.backend.jobs import OLD, live_on

Call = Callable[[], object]
LONG = 60.0  # seconds that no passing test comes near


def joined(rank: int, size: int, port: int, limit: float, backend: str = "spartito") -> None:
    """Make the default group."""
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=limit),
    )


def _objects() -> None:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, "here")


def _uneven() -> None:
    sent = torch.ones(dist.get_world_size())
    dist.all_to_all_single(torch.empty_like(sent), sent)


def _next_in_ring() -> None:
    after, before = (dist.get_rank() + 1) % dist.get_world_size(), dist.get_rank() - 1
    work: Any = dist.isend(torch.ones(3), after)
    dist.recv(torch.ones(3), before % dist.get_world_size())
    work.wait()


CALLS: dict[str, Call] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(64)),
    "large": lambda: dist.all_reduce(torch.ones(3_000_000)),
    "barrier": dist.barrier,
    "objects": _objects,
    "all_to_all": _uneven,
    "ring": _next_in_ring,
    "any_source": lambda: dist.recv(torch.ones(3)),
    "ddp": lambda: _train(DistributedDataParallel(nn.Linear(3, 3))),
    "fsdp": lambda: _train(_sharded(nn.Linear(3, 3))),
}


def _sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel  # half a second, where it is used

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def _train(model: nn.Module) -> None:
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()


def waits(pipe: Connection, rank: int, size: int, port: int, limit: float, call: str) -> Any:
    """Meet once; when told, make a call that needs all, within ``limit``. Returns its error."""
    joined(rank, size, port, LONG)
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=limit))  # type: ignore[union-attr]
    pipe.send_bytes(pickle.dumps("together"))
    pipe.recv()
    return error_of(CALLS[call])


def placed(
    pipe: Connection,
    rank: int,
    size: int,
    port: int,
    limit: float,
    machines: str,
    job: Any,
    *args: Any,
) -> Any:
    """``job``, on the machine of its letter."""
    live_on(machines[rank])
    return job(pipe, rank, size, port, limit, *args)


def error_of(call: Call) -> tuple[list[str], str]:
    """The error's classes by name, and its text; what comes after it is the same error."""
    try:
        call()
    except Exception as error:
        return [one.__name__ for one in type(error).__mro__], str(error)
    return [], "no error"


def leaves(pipe: Connection, rank: int, size: int, port: int, limit: float, early: int) -> Any:
    """Rank ``early`` takes part in one call and leaves as programs do; the rest make another."""
    joined(rank, size, port, limit)
    dist.all_reduce(torch.ones(3))
    if rank == early:
        dist.destroy_process_group()
        return "left"
    return error_of(CALLS["all_reduce"])


def loads(pipe: Connection, rank: int, size: int, port: int, limit: float) -> Any:
    """As `waits`, in processes whose DataLoader has forked others, which live on."""
    joined(rank, size, port, limit)
    dist.barrier()
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have children
    data = DataLoader(
        TensorDataset(torch.ones(64, 3)), num_workers=1, multiprocessing_context="fork"
    )
    rows = iter(data)
    next(rows)
    pipe.send_bytes(pickle.dumps("together"))
    pipe.recv()
    return error_of(CALLS["all_reduce"])


def forks(pipe: Connection, rank: int, size: int, port: int, limit: float) -> Any:
    """As `waits`, with a child that outlives its parent; its process id is sent first."""
    joined(rank, size, port, limit)
    dist.barrier()
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    pipe.send_bytes(pickle.dumps(child))
    pipe.recv()
    return error_of(CALLS["all_reduce"])


def differs(pipe: Connection, rank: int, size: int, port: int, limit: float, how: str) -> Any:
    """All ranks but the last make one call, the last another. Returns the error."""
    warnings.filterwarnings("ignore", OLD)
    joined(rank, size, port, limit)
    same, other = DIFFERENT[how]
    return error_of(other if rank == size - 1 else same)


def joins(
    pipe: Connection, rank: int, size: int, port: int, limit: float, backend: str, version: str
) -> Any:
    """The error of a rank that joins; the last one says that it has ``version``, if any."""
    if version and rank == size - 1:
        told = versions._installed
        versions._installed = lambda name: version if name == "spartito" else told(name)  # type: ignore[assignment]
    return error_of(lambda: joined(rank, size, port, limit, backend))


DIFFERENT: dict[str, tuple[Call, Call]] = {
    "shape": (CALLS["all_reduce"], lambda: dist.all_reduce(torch.ones(65))),
    "large shape": (CALLS["large"], lambda: dist.all_reduce(torch.ones(2_999_999))),
    "small and large": (CALLS["all_reduce"], CALLS["large"]),
    "dtype": (CALLS["all_reduce"], lambda: dist.all_reduce(torch.ones(64).double())),
    "operation": (CALLS["all_reduce"], lambda: dist.broadcast(torch.ones(64), 0)),
    "reduction": (CALLS["all_reduce"], lambda: dist.all_reduce(torch.ones(64), dist.ReduceOp.MAX)),
    "gathered": (
        lambda: dist.all_gather([torch.ones(3)] * dist.get_world_size(), torch.ones(3)),
        lambda: dist.all_gather([torch.ones(4)] * dist.get_world_size(), torch.ones(4)),
    ),
    "scattered": (
        lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * dist.get_world_size())),
        lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(3 * dist.get_world_size())),
    ),
    "message": (
        lambda: dist.send(torch.ones(3), dist.get_world_size() - 1) or dist.barrier(),
        lambda: dist.recv(torch.ones(4), 0),
    ),
    "sources": (  # neither waits for the other before the next call
        lambda: dist.broadcast(torch.ones(3), 0) or dist.barrier(),
        lambda: dist.broadcast(torch.ones(3), dist.get_world_size() - 1) or dist.barrier(),
    ),
}


def refused(backend: str) -> dict[str, tuple[list[str], str]]:
    """The errors of calls that no rank can make; the group goes on to work after each."""
    size = dist.get_world_size()
    calls: dict[str, Call] = {
        "meta": lambda: dist.all_reduce(torch.ones(3, device="meta")),
        "bitwise": lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
        "complex": lambda: dist.all_reduce(torch.ones(3).to(torch.complex64), dist.ReduceOp.MAX),
        "float8": lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn)),
        "sizes": lambda: dist.all_gather_into_tensor(torch.ones(3 * size + 1), torch.ones(3)),
        "splits": lambda: dist.all_to_all_single(
            torch.ones(size), torch.ones(size), [size + 1, *[0] * (size - 1)], None
        ),
        "root": lambda: dist.broadcast(torch.ones(3), size + 4),
        "list": lambda: dist.all_gather([torch.ones(3)], torch.ones(3)),
    }
    found = {}
    for name, call in calls.items():
        found[name] = error_of(call)
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [size] * 2, name
    return found
