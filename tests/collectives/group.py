"""Short-lived replica processes that a test may kill, freeze, or leave out."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from spartito.cluster.spec import ClusterSpec, Task
from spartito.collectives.collective import Collective
from spartito.collectives.membership.rendezvous import Rendezvous
from tests import stacks
from tests.commands import free_port
from tests.processes import context

Job = Callable[..., Any]
LIMIT = 120.0  # seconds that no passing test comes near


def spec(rank: int, world_size: int, port: int) -> ClusterSpec:
    """Rank ``rank`` of so many workers on this machine."""
    address = f"127.0.0.1:{port}"
    workers = {"worker": ("",) * world_size}
    task = Task("worker", rank)
    return ClusterSpec(workers, task, rank, world_size, rank, world_size, address, "the test")


def join(rank: int, world_size: int, port: int, limit: float, way: str) -> Collective:
    """The group of all tasks of a `rendezvous`."""
    return rendezvous(rank, world_size, port, limit, way).group()


def rendezvous(rank: int, world_size: int, port: int, limit: float, way: str) -> Rendezvous:
    """A job on this machine.

    ``way`` is a communication, or says which ranks take themselves to be on one machine, by a
    letter each: "on aab" puts the third on a machine of its own.
    """
    kind, _, letters = way.partition(" ")
    host = f"machine {letters[rank]}" if kind == "on" else None
    communication = "auto" if host else way
    return Rendezvous(spec(rank, world_size, port), torch.device("cpu"), limit, communication, host)


def run(job: Job, world_size: int, *args: Any, communication: str = "auto") -> list[Any]:
    """What ``job(collective, *args)`` returns on each of so many ranks."""
    port = free_port()
    with running() as group:
        for rank in range(world_size):
            group.start(rank, _joined, world_size, port, communication, job, *args)
        return [group.result(rank) for rank in range(world_size)]


def _joined(
    _: Connection, rank: int, world_size: int, port: int, communication: str, job: Job, *args: Any
) -> Any:
    collective = join(rank, world_size, port, 30, communication)
    try:
        return job(collective, *args)
    finally:
        collective.close()


class Group:
    """Processes that each run a job with a pipe to the test; `result` collects what they send."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[Any, Connection]] = {}

    def start(self, rank: int, job: Job, *args: Any) -> None:
        """Run ``job(pipe, rank, *args)`` in a process of its own."""
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(job, theirs, rank, *args), daemon=True)
        process.start()
        theirs.close()
        self._running[rank] = (process, ours)

    def result(self, rank: int, seconds: float = LIMIT) -> Any:
        """The next thing that ``rank`` sends; an error if nothing comes in time."""
        pipe = self._running[rank][1]
        if not pipe.poll(seconds):
            pids = {f"rank {n}": process.pid for n, (process, _) in self._running.items()}
            raise TimeoutError(f"rank {rank} sent nothing in {seconds} s\n{stacks.of(pids)}")
        return pickle.loads(pipe.recv_bytes())

    def tell(self, rank: int) -> None:
        """Let ``rank`` go on from its ``pipe.recv()``."""
        self._running[rank][1].send(None)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal, and return when a kill has taken effect."""
        process = self._running[rank][0]
        os.kill(process.pid, number)
        if number == signal.SIGKILL:
            process.join()

    def ended(self, rank: int) -> None:
        """Wait for the process to end of itself."""
        process = self._running[rank][0]
        process.join(LIMIT)
        assert process.exitcode is not None

    def stays(self, rank: int, seconds: float) -> bool:
        """Whether ``rank`` neither returns nor ends for so long."""
        return not self._running[rank][1].poll(seconds)

    def close(self) -> None:
        """End what still runs."""
        for process, pipe in self._running.values():
            process.kill()
            process.join()
            pipe.close()


def _serve(job: Job, pipe: Connection, rank: int, *args: Any) -> None:
    torch.set_num_threads(1)
    try:
        result = job(pipe, rank, *args)
    except Exception as error:
        result = (type(error).__name__, str(error))
    pipe.send_bytes(pickle.dumps(result))  # torch's own pickler would share the tensors


@contextmanager
def running() -> Iterator[Group]:
    """A group whose processes end with the block."""
    group = Group()
    try:
        yield group
    finally:
        group.close()
