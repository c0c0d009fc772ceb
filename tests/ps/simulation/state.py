"""The state of a job in virtual time, and what must hold of it."""

from __future__ import annotations

from collections import Counter as Counts
from random import Random
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.ps.client.vector import Vector
from spartito.ps.protocol.layout import cut
from spartito.ps.scheduler.plan import Plan
from spartito.ps.server.replica import Replica
from spartito.ps.server.store import Store
from tests.ps.simulation.disks import Disk
from tests.ps.simulation.facts import Facts
from tests.ps.simulation.network import Network
from tests.ps.simulation.scheduler import Process, Simulation, Task

LIMIT = 900.0  # virtual seconds after which a job that is not done is stuck


class Failure(Exception):
    """An invariant does not hold."""


class Model(nn.Module):
    """One long parameter for each server, an element of it for each work item."""

    def __init__(self, servers: int, items: int) -> None:
        super().__init__()
        for number in range(servers):
            zeros = torch.zeros(items, dtype=torch.float64)
            self.register_parameter(f"p{number}", nn.Parameter(zeros))


class State:
    """Of some workers and servers, and a chief that computes nothing."""

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

    def primary_of(self, part: int) -> int:
        """Who was appointed last."""
        return self.primaries.get(part, part * self.rules.replicas)

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
