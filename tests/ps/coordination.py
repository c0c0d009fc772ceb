"""A coordinator behind a real socket, and worker processes that a test may kill or freeze."""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from spartito.ps.client.work_source import WorkerLink
from spartito.ps.protocol.work import Complete, Lease, Report, Totals, WorkSource
from spartito.ps.scheduler.coordinator import Coordinator
from spartito.ps.scheduler.listener import WorkerListener
from spartito.ps.scheduler.plan import Plan
from spartito.wire.addresses import DRAWN, Endpoint
from spartito.wire.listening import listen
from tests.callers import read_to_end

HOST = "127.0.0.1"
LIMIT = 30.0


def plan(**changes: Any) -> Plan:
    facts: dict[str, Any] = {
        "data_shards": 2,
        "steps_per_pass": 20,
        "passes_per_epoch": 1,
        "epoch_steps": None,
        "epochs": 1,
    }
    return Plan(**(facts | changes))


@contextmanager
def serving(workers: int, **options: Any) -> Iterator[tuple[Coordinator, int]]:
    """A coordinator of so many workers, and the port at which it lets them in."""
    names = [f"worker {index}" for index in range(workers)]
    coordinator = Coordinator(names, **({"timeout": LIMIT} | options))
    try:
        listener = listen(Endpoint("the chief", HOST, (DRAWN,)), LIMIT)
        WorkerListener(coordinator).listen(listener)
        yield coordinator, listener.getsockname()[1]
    finally:
        coordinator.close()


def link(port: int, worker: int, timeout: float = LIMIT) -> WorkerLink:
    return WorkerLink.connect(HOST, port, "the chief", worker, timeout=timeout)


def report(lease: Lease, **facts: Any) -> Report:
    """That a lease is done; the sums are its work items, and their steps."""
    steps = range(lease.start, lease.stop)
    return Report(lease.id, [float(len(steps)), float(sum(steps))], **facts)


def whole(steps: int = 20, data_shards: int = 2) -> list[float]:
    """The sums of an epoch of which every work item was counted once."""
    return [float(steps * data_shards), float(sum(range(steps)) * data_shards)]


def work(source: WorkSource, epochs: int, stream: int = 0) -> list[Lease]:
    """Do what there is to do in some epochs; returns the leases."""
    done: list[Lease] = []
    for epoch in range(epochs):
        finished: Report | None = None
        while not isinstance(found := source.take(stream, epoch, finished), Complete):
            assert isinstance(found, Lease)
            done.append(found)
            finished = report(found)
        if found.stop:
            break
    return done


def wait(coordinator: Coordinator, stream: int, epoch: int) -> Totals:
    """What an epoch came to, once it is done."""
    while not coordinator.poll(stream, epoch, 0.1):
        pass
    return coordinator.sums(stream, epoch)


# Jobs of processes: each is called with a pipe to the test and its index.


def hold(pipe: Connection, worker: int, port: int) -> Any:
    """Take a lease, say which, and go on when told to: report it, and do what else there is."""
    with_link = link(port, worker)
    lease = with_link.take(0, 0, None)
    assert isinstance(lease, Lease)
    send(pipe, (lease.id, lease.group))
    pipe.recv()
    after = with_link.take(0, 0, report(lease))
    done = []
    while isinstance(after, Lease):
        done.append(after.id)
        after = with_link.take(0, 0, report(after))
    with_link.close()
    return done


def lead(pipe: Connection, _: int) -> Any:
    """Be a chief with one stream that gives no work, until the end of the process."""
    with serving(2, expect_all=True) as (coordinator, port):
        coordinator.open(0, plan())
        send(pipe, port)
        pipe.recv()


def send(pipe: Connection, value: Any) -> None:
    pipe.send_bytes(pickle.dumps(value))


def eventually(condition: Callable[[], bool], limit: float = LIMIT) -> None:
    """Return when ``condition`` holds; the test fails if it does not in time."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def unknown_peer(port: int, data: bytes) -> bytes:
    """What a connection that sends ``data`` hears until it is closed."""
    with socket.create_connection((HOST, port), LIMIT) as connection:
        connection.sendall(data)
        return read_to_end(connection)
