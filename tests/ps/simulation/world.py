"""A job in virtual time: its processes, what happens to them, and what must hold in the end."""

from __future__ import annotations

import copy
import logging
from collections import Counter as Counts
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.optim import SGD

from spartito.collectives.versions import Versions
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.ps.chief import JOB, Chief, views_of
from spartito.ps.client.appointments import SILENT_SECONDS, Appointments
from spartito.ps.client.appointments import Server as Watched
from spartito.ps.client.control import Control
from spartito.ps.client.link import Address, Link
from spartito.ps.client.servers import Servers
from spartito.ps.client.vector import Vector
from spartito.ps.client.work_source import WorkerLink
from spartito.ps.protocol.layout import cut
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
from spartito.ps.protocol.rules import Rules
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
from spartito.ps.scheduler.journal import Journal
from spartito.ps.scheduler.ledger import Book, Kept
from spartito.ps.scheduler.listener import WorkerListener
from spartito.ps.scheduler.plan import Plan
from spartito.ps.server.copies import COPY_SECONDS
from spartito.ps.server.counter import Counter
from spartito.ps.server.replica import Replica
from spartito.ps.server.server import Server
from spartito.ps.server.shard import Shard
from spartito.ps.server.snapshot import Snapshot
from spartito.ps.server.store import Store
from spartito.ps.server.update_log import PushLog
from spartito.strategies.pusher import Pusher, WorkPosition
from tests.ps.simulation.network import Faults, Network
from tests.ps.simulation.scheduler import Process, Simulation, Stuck, Task

STREAM, PASS = 1, 0
NO_EPOCH = -1
TIMEOUT = 60.0  # virtual seconds
LEASE_SECONDS = 4.0
LIMIT = 900.0  # virtual seconds after which a job that is not done is stuck
VERSIONS = Versions.own()


@dataclass(frozen=True)
class Facts:
    """What a schedule is made of, drawn from its seed."""

    rules: Rules
    steps: int
    epochs: int
    faults: Faults
    kills: tuple[tuple[float, str], ...]
    freezes: tuple[tuple[float, float, str], ...]
    """When, for how long, and who. A frozen worker is replaced by another process meanwhile."""
    snapshot_seconds: float
    chief_dies: float | None
    chief_kills: tuple[float, ...] = ()
    """When it is killed; another process goes on as the chief a while later."""

    @classmethod
    def drawn(cls, random: Random) -> Facts:
        workers, servers = random.choice([1, 2, 2, 3]), random.choice([1, 1, 2])
        bound, on_stale, aggregate = random.choice(
            [(None, "wait", 1), (1, "wait", 1), (2, "wait", 1), (1, "reject", 1), (0, "wait", 1),
             (0, "wait", 1), (1, "compensate", 1), (None, "wait", 2)]
        )  # fmt: skip
        calm = random.choice([0.0, 3.0, 8.0])
        tasks = [f"ps {n}" for n in range(servers)] + [f"worker {n}" for n in range(workers)]
        kills, freezes = [], []
        if calm:
            for _ in range(random.choice([0, 1, 1, 2, 3])):
                kills.append((random.random() * calm, random.choice(tasks)))
            if random.random() < 0.3:
                freezes.append((random.random() * calm, random.random() * 8, random.choice(tasks)))
        return cls(
            Rules(workers, bound, on_stale, aggregate, servers=servers),
            steps=random.randrange(2, 6),
            epochs=random.choice([1, 1, 2]),
            faults=Faults(
                latency=random.choice([0.001, 0.05, 0.3]),
                lose=random.choice([0.0, 0.0, 0.01, 0.04]),
                cut=random.choice([0.0, 0.0, 0.01, 0.04]),
                calm=calm,
            ),
            kills=tuple(sorted(kills)),
            freezes=tuple(freezes),
            snapshot_seconds=random.choice([0.3, 1.0, 3.0]),
            chief_dies=random.random() * 4 if random.random() < 0.03 else None,
        )

    def with_chiefs(self, random: Random) -> Facts:
        """The same with a chief that is killed, frozen and replaced, in one of three."""
        if self.chief_dies is not None or random.random() > 1 / 3:
            return self
        end = max(self.faults.calm, 4.0)
        kills = sorted(random.random() * end for _ in range(random.choice([1, 1, 2, 3])))
        freezes = [*self.freezes]
        if random.random() < 0.3:
            freezes.append((random.random() * end, random.random() * 8, "chief"))
        return replace(self, chief_kills=tuple(kills), freezes=tuple(freezes))

    def with_replicas(self, random: Random) -> Facts:
        """The same with every value on two servers, more of them killed, and partitions."""
        servers = 2 * self.rules.servers
        rules = replace(self.rules, servers=servers, replicas=2, aggregate=1)
        names = [f"ps {n}" for n in range(servers)]
        end = self.faults.calm or random.choice([0.0, 6.0])
        kills, freezes, partitions = list(self.kills), list(self.freezes), []
        if end:
            for _ in range(random.choice([1, 1, 2, 3])):
                kills.append((random.random() * end, random.choice(names)))
            if random.random() < 0.3:
                freezes.append((random.random() * end, random.random() * 8, random.choice(names)))
            if random.random() < 0.4:
                begin = random.random() * end
                alone = random.sample(names, random.choice([1, 1, min(2, servers - 1)]))
                partitions.append((begin, begin + random.random() * 6, frozenset(alone)))
        return replace(
            self, rules=rules, kills=tuple(sorted(kills)), freezes=tuple(freezes),
            faults=replace(self.faults, partitions=tuple(partitions)),
        )  # fmt: skip


class Failure(Exception):
    """An invariant does not hold."""


@dataclass
class Disk:
    """What of a server outlives its process."""

    snapshot: tuple[dict[str, Tensor], dict[str, Any]] | None = None
    updates: int = 0
    log: list[list[int]] = field(default_factory=list)
    """The work items of every update that counts."""


class MemoryJournal(Journal):
    """Of a chief: what it wrote outlives it."""

    def __init__(self, records: list[bytes]) -> None:
        self._records, self.size = records, 0

    def read(self) -> list[bytes]:
        return list(self._records)

    def append(self, record: bytes) -> None:
        self._records.append(record)

    def rewrite(self, record: bytes) -> None:
        self._records[:] = [record]

    def remove(self) -> None:
        self._records.clear()


class DiskCounter(Counter):
    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    @property
    def value(self) -> int:
        return self._disk.updates

    @value.setter
    def value(self, number: int) -> None:
        self._disk.updates = number


class DiskSnapshot(Snapshot):
    def __init__(self, disk: Disk, process: Process) -> None:
        self._disk, self._process = disk, process
        self._name = process.name

    def counter(self) -> Counter:
        return DiskCounter(self._disk)

    def write(self, store: Store) -> int:
        with store.lock:
            tensors, about = store.dump()
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        store.buffers.give_back(tensors)
        self._process.sleep(self._process.simulation.random.random() * 0.2)  # it may die now
        self._disk.snapshot = kept, copy.deepcopy(about)
        version: int = about["counts"][0]
        return version

    def restore(self, store: Store, job: str) -> bool:
        if self._disk.snapshot is None or self._disk.snapshot[1]["job"] != job:
            return False
        tensors, about = self._disk.snapshot
        store.restore({name: t.clone() for name, t in tensors.items()}, copy.deepcopy(about))
        return True

    def missing(self, job: str) -> TaskLostError:
        return TaskLostError(f"{self._name} has no snapshot")

    def remove(self) -> None:
        """The log is kept for the checks."""


class DiskLog(PushLog):
    """Notes which work items an update is made of, and checks who pushed them."""

    def __init__(self, world: World, number: int, disk: Disk) -> None:
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

    def __init__(self, owner: Server, world: World, number: int) -> None:
        super().__init__(owner)
        self._world, self._number = world, number

    def appoint(self, asked: Appoint) -> Standing:
        was, standing = self._store.primary, super().appoint(asked)
        if standing.primary and not was:
            self._world.appointed(self._number, self._store, asked.restore)
        return standing


class SimulatedServer(Server):
    world: World
    process: Process

    def reach(self, address: str) -> Channel:
        wire = self.world.network.connect(self.process, address, Reply)
        wire.timeout = COPY_SECONDS
        return wire

    def serve_task(self, wire: Channel) -> None:
        with suppress(KeyError):
            super().serve_task(wire)


class SimulatedLink(Link):
    def __init__(self, world: World, process: Process, number: int, hello: Hello) -> None:
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


class Model(nn.Module):
    """One long parameter for each server, an element of it for each work item."""

    def __init__(self, servers: int, items: int) -> None:
        super().__init__()
        for number in range(servers):
            zeros = torch.zeros(items, dtype=torch.float64)
            self.register_parameter(f"p{number}", nn.Parameter(zeros))


class Gradients:
    """As of a pair: those of the work item that was computed last."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def reduce(self) -> tuple[float, float]:
        return 1.0, 0.0

    def clear(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None


class World:
    """A job of some workers and servers, and a chief that computes nothing."""

    def __init__(self, seed: int, replicas: int = 1) -> None:
        self.random = Random(seed)
        self.facts = Facts.drawn(self.random)
        self.facts = self.facts.with_chiefs(Random(f"chiefs {seed}"))
        if replicas > 1:
            self.facts = self.facts.with_replicas(Random(f"replicas {seed}"))
        rules = self.rules = self.facts.rules
        self.simulation = Simulation(self.random, LIMIT)
        self.network = Network(self.simulation, self.facts.faults)
        self.items = self.facts.steps * self.facts.epochs * rules.workers
        model = Model(rules.spans, self.items)
        vector = Vector(model, SGD(model.parameters(), lr=1.0))
        self.layout = vector.layout
        self.spans = cut(self.layout, rules.spans, 1 << 30, False)
        self.replied: list[set[Any]] = [set() for _ in self.spans]
        """The work items of each span whose pushes had a reply."""
        self.plan = Plan(
            data_shards=rules.workers,
            steps_per_pass=self.facts.steps,
            passes_per_epoch=1,
            epoch_steps=None,
            epochs=self.facts.epochs,
            gated=rules.max_staleness is not None,
            together=rules.together,
        )
        self.disks = [Disk() for _ in range(rules.servers)]
        self.processes: dict[str, Process] = {}
        self.stores: dict[int, Store] = {}
        self.replicas: dict[int, Replica] = {}
        self.primaries: dict[int, int] = {}
        self.sums: dict[int, list[float]] = {}
        self.records: list[bytes] = []
        self.reigns = 0
        self.begun = False
        self.versions: dict[str, int] = {}
        self.generations: dict[Process | None, tuple[int, int]] = {}
        self.welcomed: dict[int, int] = {}  # the newest generation that each worker was told
        self.restarts = 0
        self.old: list[Process] = []  # that were replaced while they lived
        self.seen = 0  # crashes that were looked at
        self.finished = False
        self.wrong: list[str] = []
        self.lost = 0

    # Processes

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

    def primary_of(self, part: int) -> int:
        """Who was appointed last."""
        return self.primaries.get(part, part * self.rules.replicas)

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

    # What happens

    def run(self) -> None:
        """The whole job; raises `Failure` with what does not hold."""
        for number in range(self.rules.servers):
            self.process(f"ps {number}", self.server(number))
        self.process("chief", self.lead)
        for worker in range(self.rules.workers):
            self.process(f"worker {worker}", self.worker(worker))
        supervisor = Process(self.simulation, "supervisor")
        supervisor.start(lambda: self.supervise(supervisor), "main")
        try:
            if self.facts.chief_dies is not None:
                self.simulation.run(lambda: all(p.ended for p in self.processes.values()))
            else:
                self.simulation.run(self.is_done)
                supervisor.kill()
                self.simulation.run(lambda: all(p.ended for p in self.processes.values()))
        except Stuck as stuck:
            raise Failure(f"no progress: {stuck}; {self.state()}") from None
        finally:
            self.end()
        self.check()

    def is_done(self) -> bool:
        return (self.processes["chief"].ended and self.finished) or self.over()

    def over(self) -> bool:
        crashes = self.simulation.crashes
        if len(crashes) > self.seen:
            self.seen = len(crashes)
            if not all(self.is_expected(task, error) for task, error in crashes):
                return True
        return bool(self.wrong)

    def end(self) -> None:
        """Unwind what still waits, so that nothing is left."""
        for process in [*self.processes.values(), *self.old]:
            process.kill()

    def supervise(self, process: Process) -> None:
        """Kills, freezes, and starts again what has died."""
        events: list[tuple[float, str, float]] = [
            *((at, name, 0.0) for at, name in self.facts.kills),
            *((at, name, seconds) for at, seconds, name in self.facts.freezes),
        ]
        if self.facts.chief_dies is not None:
            events.append((self.facts.chief_dies, "chief", 0.0))
        events += [(at, "chief", 0.0) for at in self.facts.chief_kills]
        events.sort()
        absent = 0.0
        while not self.finished:
            process.sleep(0.25)
            while events and events[0][0] <= process.now():
                _, name, seconds = events.pop(0)
                victim = self.processes[name]
                if seconds and not victim.ended:
                    victim.frozen_until = process.now() + seconds
                    if name.startswith("worker") and self.random.random() < 0.5:
                        self.old.append(victim)
                        self.process(name, self.worker(int(name.split()[1])))
                    split = self.begun and not self.rules.together
                    if name == "chief" and split and self.random.random() < 0.7:
                        # A port and a lock prevent that on one machine; a round that the old one
                        # began would be waited for until the time limit. Before the beginning
                        # each chief has a job of its own, with another name.
                        self.old.append(victim)
                        self.records = list(self.records)  # what it writes is of no file any more
                        self.process(name, self.lead)
                elif not victim.ended:
                    victim.kill()
            if self.processes["chief"].dead():
                if self.facts.chief_dies is not None:
                    return
                absent = absent or process.now() + self.random.random() * 5
                if process.now() >= absent:
                    absent = 0.0
                    self.process("chief", self.lead)
            for name, task in list(self.processes.items()):
                if name != "chief" and (task.dead() or task.ended) and not self.finished:
                    kind, _, number = name.partition(" ")
                    self.restarts += 1
                    start = self.server if kind == "ps" else self.worker
                    self.process(name, start(int(number)))

    def server(self, number: int) -> Callable[[Process], None]:
        return lambda process: self.serve(number, process)

    def worker(self, number: int) -> Callable[[Process], None]:
        return lambda process: self.compute(number, process)

    # What must hold

    def applied(self, number: int, items: list[int]) -> None:
        """A server makes an update of these work items, in the thread of a connection."""
        if len(items) > 1 and not (self.rules.together or self.rules.aggregate > 1):
            self.wrong.append(f"ps {number} made one update of {items}")
        if self.rules.together and len(items) > self.rules.workers:
            self.wrong.append(f"ps {number} averaged {len(items)} pushes: {items}")
        worker, generation = self.generations.get(self.simulation.current.client, (0, 1 << 30))
        serves = number == self.primary_of(number // self.rules.replicas)  # and was not replaced
        if serves and generation < self.welcomed.get(worker, 0):
            self.wrong.append(f"ps {number} took a push of a process that was replaced: {items}")
        known = Counts(item for update in self.disks[number].log for item in update)
        if twice := [item for item in items if known[item] > 1]:
            self.wrong.append(f"ps {number} applied {twice} twice")

    def settled(self, epoch: int) -> None:
        """The chief takes an epoch for done: every server has all of it, once."""
        until = (epoch + 1) * self.facts.steps * self.rules.workers
        for number in map(self.primary_of, range(self.rules.spans)):
            disk = self.disks[number]
            found = Counts(item for update in disk.log for item in update)
            if wrong := [item for item in range(until) if found[item] != 1]:
                self.wrong.append(f"epoch {epoch} is done, but not on ps {number}: {wrong}")
            one_by_one = not self.rules.together and self.rules.aggregate == 1
            as_they_are = self.rules.on_stale in ("reject", "wait")
            if one_by_one and self.stores[number].ready and as_they_are:
                values = self.stores[number].shard.values.view(torch.float64)[:until]
                if not torch.equal(values, torch.full_like(values, -1.0)):
                    self.wrong.append(f"the values of ps {number} are {values.tolist()}")

    def appointed(self, number: int, store: Store, restored: bool) -> None:
        """A server becomes the primary: it has all that ever had a reply, or both were lost."""
        part = number // self.rules.replicas
        self.primaries[part], replied = number, self.replied[part]
        if restored:
            replied &= {key for key in replied if store.applied(key)}
        if missing := sorted(key for key in replied if not store.applied(key)):
            self.wrong.append(f"ps {number} was appointed without {missing}")

    def is_expected(self, task: Task, error: BaseException) -> bool:
        if self.facts.chief_dies is not None:
            return isinstance(error, SpartitoError)
        # Who broke a connection too often, or was replaced, is started again.
        name = task.process.name
        if self.finished and name.startswith("ps"):  # started again when the chief had left
            return isinstance(error, TaskLostError)
        if task.process in self.old and name == "chief":
            return isinstance(error, TaskLostError)
        return isinstance(error, TaskLostError | UserError) and name.startswith("worker")

    def check(self) -> None:
        wrong = list(self.wrong)
        for task, error in self.simulation.crashes:
            if not self.is_expected(task, error):
                wrong.append(f"{task.name}: {type(error).__name__}: {error}")
        if self.facts.chief_dies is not None:
            self._raise(wrong)
            return
        if not self.finished:
            wrong.append("the chief did not finish")
        per_epoch = self.facts.steps * self.rules.workers
        if sorted(self.sums) != list(range(self.plan.epochs)):
            wrong.append(f"there are totals of epochs {sorted(self.sums)}")
        for epoch, sums in self.sums.items():
            items = range(epoch * per_epoch, (epoch + 1) * per_epoch)
            if sums != [float(len(items)), float(sum(items))]:
                wrong.append(f"the totals of epoch {epoch} are {sums}, of items {items}")
        for number, store in self.stores.items():
            limit = self.rules.max_staleness
            bounded = limit is not None and self.rules.on_stale in ("reject", "wait")
            if bounded and store.staleness.max > (limit or 0):
                wrong.append(f"ps {number} took a push {store.staleness.max} updates late")
            faults = self.facts.faults
            slow = self.rules.replicas > 1 and faults.latency > 0.1  # longer than a lease at first
            disturbed = faults.calm or faults.partitions or slow
            quiet = not (self.facts.kills or self.facts.freezes or disturbed)
            quiet = quiet and not self.facts.chief_kills
            if quiet and self.rules.waits and store.refused:
                wrong.append(f"ps {number} granted pulls that led to {store.refused} stale pushes")
            if self.rules.together and quiet:
                sizes = {len(update) for update in self.disks[number].log}
                if sizes != {self.rules.workers}:
                    wrong.append(f"rounds of ps {number} have {sizes} pushes")
        self._raise(wrong)

    def _raise(self, wrong: list[str]) -> None:
        if wrong:
            raise Failure("; ".join(wrong[:4]))

    def state(self) -> str:
        waiting = [
            task.name
            for p in self.processes.values()
            if not p.dead()
            for task in p.tasks
            if not task.done
        ]
        return f"at {self.simulation.now:.2f} s: {waiting}"


def simulate(seed: int, replicas: int = 1) -> str | None:
    """Run the schedule of a seed: what was wrong, or None."""
    logging.disable(logging.CRITICAL)
    try:
        World(seed, replicas).run()
    except Failure as failure:
        return str(failure)
    finally:
        logging.disable(logging.NOTSET)
    return None
