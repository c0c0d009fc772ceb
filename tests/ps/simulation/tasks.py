"""The tasks of a job in virtual time: servers, workers and a chief, on connections in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor
from torch.optim import SGD

from spartito.collectives.membership.versions import Versions
from spartito.errors import SpartitoError, TaskLostError
from spartito.ps.chief import JOB, Chief, views_of
from spartito.ps.client.appointments import SILENT_SECONDS, Appointments
from spartito.ps.client.appointments import Server as Watched
from spartito.ps.client.control import Control
from spartito.ps.client.link import Address, Link
from spartito.ps.client.servers import Servers
from spartito.ps.client.vector import Vector
from spartito.ps.client.work_source import WorkerLink
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.messages import (
    Appoint,
    Errand,
    Hello,
    Outcome,
    Push,
    Reply,
    Request,
    Standing,
)
from spartito.ps.protocol.options import settings
from spartito.ps.protocol.runtime import Channel
from spartito.ps.protocol.work import (
    MAX_PUBLISHED,
    Complete,
    Lease,
    Pause,
    Report,
    ToCoordinator,
    ToWorker,
    WorkSource,
)
from spartito.ps.scheduler.coordinator import Coordinator
from spartito.ps.scheduler.ledger import Book, Kept
from spartito.ps.scheduler.listener import WorkerListener
from spartito.ps.server.copies import COPY_SECONDS
from spartito.ps.server.replica import Replica
from spartito.ps.server.server import Server
from spartito.ps.server.shard import Shard
from spartito.ps.server.store import Store
from spartito.ps.server.update_log import PushLog
from spartito.steps.servers.push import Pusher, WorkPosition
from tests.ps.simulation.disks import Disk, DiskSnapshot, MemoryJournal
from tests.ps.simulation.scheduler import Process
from tests.ps.simulation.state import Model, State

STREAM = 1
TIMEOUT = 60.0  # virtual seconds
LEASE_SECONDS = 4.0
VERSIONS = Versions.own()


class DiskLog(PushLog):
    """Notes which work items an update is made of, and checks who pushed them."""

    def __init__(self, world: Tasks, number: int, disk: Disk) -> None:
        self._world, self._number, self._disk = world, number, disk

    @property
    def position(self) -> int:
        return copy.deepcopy(self._disk.log)  # type: ignore[return-value]

    def append(
        self, shard: Shard, gradient: Tensor, absent: Sequence[int], rate: float, fresh: float
    ) -> None:
        items = gradient.view(torch.float64).nonzero().flatten().tolist()
        self._disk.log.append(items)
        self._world.applied(self._number, items)

    def cut(self, position: Any) -> None:
        self._disk.log[:] = copy.deepcopy(position or [])  # of a primary, if it was copied


class SimulatedReplica(Replica):
    """Looks whether who is appointed has all that ever had a reply."""

    def __init__(self, owner: Server, world: Tasks, number: int) -> None:
        super().__init__(owner)
        self._world, self._number = world, number

    def appoint(self, asked: Appoint) -> Standing:
        was, standing = self._store.primary, super().appoint(asked)
        if standing.primary and not was:
            self._world.appointed(self._number, self._store, asked.restore)
        return standing


class SimulatedServer(Server):
    world: Tasks
    process: Process

    def reach(self, address: str) -> Channel:
        wire = self.world.network.connect(self.process, address, Reply)
        wire.timeout = COPY_SECONDS
        return wire

    def serve_task(self, wire: Channel) -> None:
        with suppress(KeyError):
            super().serve_task(wire)


class SimulatedLink(Link):
    def __init__(self, world: Tasks, process: Process, number: int, hello: Hello) -> None:
        self._world, self._process = world, process
        self._number = number
        super().__init__(
            [Address(f"ps {n}", "", n) for n in world.servers_of(number)], hello,
            world.spans[number], world.vector_of(process), None, TIMEOUT, runtime=process,
        )  # fmt: skip

    def _dial(self, where: Address, end: float, most: float = 0.0) -> Channel:
        wire = self._world.network.connect(self._process, where.name, Reply)
        wire.timeout = max(0.2, end - self._process.now())
        return wire

    def receive(self, asked: Any) -> Any:
        reply = super().receive(asked)
        if isinstance(asked, Push) and reply.outcome in (Outcome.APPLIED, Outcome.DUPLICATE):
            self._world.replied[self._number] |= set(asked.keys)
        return reply


class Gradients:
    """As of a pair: those of the work item that was computed last."""

    changed = False

    def __init__(self, model: Model) -> None:
        self._model = model

    def reduce(self) -> tuple[float, float]:
        return 1.0, 0.0

    def clear(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None


class Tasks(State):
    """What each of them does."""

    def process(self, name: str, target: Callable[[Process], None]) -> Process:
        process = self.processes[name] = Process(self.simulation, name)

        def main() -> None:
            try:
                target(process)
            except SpartitoError:
                process.kill()  # it ends with an error, its connections closed
                raise

        process.start(main, "main")
        return process

    def vector_of(self, process: Process) -> Vector:
        found: Vector | None = getattr(process, "vector", None)
        if found is None:
            model = Model(self.rules.spans, self.items)
            found = Vector(model, SGD(model.parameters(), lr=1.0))
            process.vector, process.model = found, model  # type: ignore[attr-defined]
        return found

    def hello(self, task: str, worker: int, generation: int, control: bool) -> Hello:
        return Hello(
            task=task, worker=worker, chief=control, job="job", digest=self.layout.digest,
            versions=VERSIONS, rules=str(self.rules), host="", generation=generation,
            loaded=not control,
        )  # fmt: skip

    def serve(self, number: int, process: Process) -> None:
        model = Model(self.rules.spans, self.items)
        optimizer = SGD(model.parameters(), lr=1.0)
        vector = Vector(model, optimizer)
        disk = self.disks[number]
        part = number // self.rules.replicas
        shard = Shard(self.layout, self.spans[part], optimizer, vector.tensors)
        log = DiskLog(self, number, disk)
        store = Store(shard, self.rules, gates=part == 0, log=log, runtime=process)
        self.stores[number] = store
        server = SimulatedServer(
            store, None, name=process.name, chief="the chief", wire_dtype=None, timeout=TIMEOUT,
            snapshot=DiskSnapshot(disk, process), seconds=self.facts.snapshot_seconds,
            shares=False,
        )  # fmt: skip
        # The incarnation comes of the seed, as all else.
        server.incarnation = f"{number}.{self.random.random()}"
        server.world, server.process = self, process
        server.replica = self.replicas[number] = SimulatedReplica(server, self, number)
        self.network.listen(process.name, process, server.serve_task, Request)
        server.serve()

    def servers_of(self, part: int) -> range:
        """The numbers of the servers of a span."""
        return range(part * self.rules.replicas, (part + 1) * self.rules.replicas)

    def watched(self, process: Process, hello: Hello) -> list[list[Watched]]:
        if self.rules.replicas == 1:
            return []

        def dial(name: str, end: float) -> Channel:
            wire = self.network.connect(process, name, Reply)
            wire.timeout = SILENT_SECONDS
            return wire

        hello = structs.replace(hello, errand=Errand.WATCH)
        return [
            [
                Watched(f"ps {n}", f"ps {n}", hello, partial(dial, f"ps {n}"))
                for n in self.servers_of(part)
            ]
            for part in range(self.rules.spans)
        ]

    def lead(self, process: Process) -> None:
        rules, book = self.rules, Book("job", MemoryJournal(self.records))
        self.reigns += 1
        hello = self.hello("worker 0", -1, book.ledger.reign, True)
        hello = structs.replace(hello, loaded=book.goes_on)
        appointments = Appointments(self.watched(process, hello), "job", process)
        appointments.begin(TIMEOUT, views_of(book.ledger.primaries))
        links = [SimulatedLink(self, process, part, hello) for part in range(rules.spans)]
        control = Control(links, process)

        def coordinator(on_lost: Any, on_came: Any) -> Coordinator:
            return Coordinator(
                [f"worker {n}" for n in range(rules.workers)],
                lease_seconds=LEASE_SECONDS, timeout=TIMEOUT, on_lost=on_lost, on_came=on_came,
                expect_all=rules.together, book=book, runtime=process,
            )  # fmt: skip

        chief = Chief(coordinator, control, "job", rules.workers, appointments)
        values = [allocate(span) for span in self.spans]
        options = settings(SGD(self.vector_of(process).tensors, lr=1.0))
        if not book.goes_on:
            control.load("job", values, [{} for _ in values], options)
        chief.begin()
        self.begun = True
        listener = WorkerListener(chief.coordinator)
        self.network.listen("chief", process, listener.serve, ToCoordinator)
        if book.ledger.ended:
            self.finished = True
            chief.close()
            return
        chief.open(STREAM, self.plan)
        first = int(book.ledger.kept or 0)
        if first:
            chief.coordinator.close_epoch(STREAM, first - 1)
        for epoch in range(first, self.plan.epochs):
            chief.coordinator.note(Kept(str(epoch).encode()))
            while True:
                while not chief.coordinator.poll(STREAM, epoch, 0.5):
                    pass
                chief.flush()
                if chief.is_settled(STREAM, epoch):
                    break
            self.sums[epoch] = chief.coordinator.sums(STREAM, epoch).sums
            if rules.max_staleness is not None or epoch == self.plan.epochs - 1:
                self.settled(epoch)
            chief.coordinator.close_epoch(STREAM, epoch)
        self.lost = chief.lost
        chief.end_stream(STREAM)
        self.finished = True
        chief.close()

    def compute(self, worker: int, process: Process) -> None:
        began = process.now()

        def dial(seconds: float | None) -> Channel:
            wire = self.network.connect(process, "chief", ToWorker, MAX_PUBLISHED)
            wire.timeout = TIMEOUT
            return wire

        patience = TIMEOUT if self.facts.chief_kills else 0.0
        while True:
            try:
                source = WorkerLink(dial, "the chief", worker, process, patience)
                break
            except OSError:
                if process.now() > began + TIMEOUT:
                    raise TaskLostError("the chief did not come") from None
                process.sleep(0.2)
        self.generations[process] = worker, source.generation
        self.welcomed[worker] = max(source.generation, self.welcomed.get(worker, 0))
        assert source.published(JOB) == b"job"
        links = [
            SimulatedLink(
                self, process, n, self.hello(process.name, worker, source.generation, False)
            )
            for n in range(self.rules.spans)
        ]
        servers = Servers(links, self.vector_of(process), self.rules.waits)
        delay = self.random.choice([0.02, 0.1, 0.4])
        model: Model = process.model  # type: ignore[attr-defined]

        def gradients(batch: Any) -> None:
            process.sleep(delay * self.random.random())
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter.data)
                parameter.grad[batch.item] = 1.0
            pair.passes = 1

        pair: Any = SimpleNamespace(passes=0, clip_norm=None, gradients=Gradients(model))
        pusher = Pusher(pair, servers, self.rules, gradients)
        for epoch in range(self.plan.epochs):
            if self.work(source, pusher, epoch, gradients):
                break
        source.close()
        servers.close()

    def work(
        self, source: WorkSource, pusher: Pusher, epoch: int, compute: Callable[[Any], None]
    ) -> bool:
        """One epoch of a worker; whether the stream was stopped."""
        report: Report | None = None
        while True:
            work = source.take(STREAM, epoch, report, wait=False)
            if isinstance(work, Pause):
                pusher.servers.release()
                work = source.take(STREAM, epoch, None)
            if isinstance(work, Complete):
                pusher.servers.release()
                return work.stop
            assert isinstance(work, Lease)
            report = self.do(work, pusher, compute)

    def do(self, lease: Lease, pusher: Pusher, compute: Callable[[Any], None]) -> Report:
        position = pusher.current = WorkPosition(STREAM, lease)

        def given_up() -> bool:
            return position.abandoned

        try:
            numbers = []
            for step in range(lease.start, lease.stop):
                position.step = step
                batch: Any = SimpleNamespace(size=1, item=self.number(lease, step))
                numbers.append(float(batch.item))
                pusher.ready(batch)
                compute(batch)
                if given_up():  # found so while the values were awaited
                    pusher.pair.passes = 0
                    break
                pusher.push()
                if given_up():
                    break
            pusher.settle()
        finally:
            pusher.current = None
        sums = [float(len(numbers)), sum(numbers)]
        return Report(lease.id, sums, None, position.bad, position.detail, position.abandoned)

    def number(self, lease: Lease, step: int) -> int:
        return (lease.pass_ * self.facts.steps + step) * self.rules.workers + lease.data_shard
