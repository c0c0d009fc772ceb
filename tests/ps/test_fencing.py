"""Two servers, a bound, and every fault at any moment: what the rules promise all the same.

The stores are real; a process is what a worker's does with them, one message at a time, and the
chief is what `Chief` and `Control` tell the servers.
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.errors import UserError
from spartito.ps.protocol.keys import Key
from spartito.ps.protocol.messages import Outcome
from spartito.ps.protocol.rules import Rules
from spartito.ps.server.store import Store
from tests.ps.bench import Bench, push

SERVERS = (1, 0)  # a push goes to the gate last


@dataclass
class Process:
    """One process of a worker: what it does next, and with what values."""

    worker: int
    generation: int
    work_item: Key | None = None
    todo: list[tuple[str, int]] = field(default_factory=list)
    pulled: dict[int, int] = field(default_factory=dict)
    incarnations: dict[int, int] = field(default_factory=dict)
    stale: bool = False

    def pull(self) -> None:
        """From the gate first, then from the other; and push the other way round."""
        self.todo = [("pull", 0), ("pull", 1), *(("push", server) for server in SERVERS)]
        self.stale = False


class Cluster:
    """Servers, processes, and the chief that gives out work items."""

    def __init__(self, workers: int, limit: int, work_items: int) -> None:
        self.rules = Rules(workers, limit)
        self.stores = [self._store(number) for number in (0, 1)]
        self.incarnations = [0, 0]
        self.snapshots = [deepcopy(store.dump()) for store in self.stores]
        self.generations: dict[int, int] = {}
        self.queue = [(1, 0, step, 0) for step in range(work_items)]
        self.work_items = list(self.queue)
        self.processes: list[Process] = []
        self.old: list[Process] = []
        for worker in range(workers):
            self.come(worker)

    def _store(self, number: int) -> Store:
        return Bench(self.rules, gates=number == 0).store

    # Faults

    def come(self, worker: int) -> None:
        """A process replaces a worker; the old one does not know."""
        for process in [one for one in self.processes if one.worker == worker]:
            self.processes.remove(process)
            self.old.append(process)
            self._give_back(process)
        self.generations[worker] = sum(self.generations.values()) + 1
        for store in self.stores:
            with store.lock:
                store.fence(self.generations)
        self.processes.append(Process(worker, self.generations[worker]))

    def lose(self, process: Process) -> None:
        """The chief gives up a process that is frozen, and will go on."""
        if process.work_item is not None and process.work_item not in self.queue:
            self.queue.append(process.work_item)
        for store in self.stores:
            with store.lock:
                store.lose(process.worker, 0, 0)

    def restart(self, number: int) -> None:
        """A server goes on from its snapshot, and knows of no process."""
        self.stores[number] = self._store(number)
        tensors, about = deepcopy(self.snapshots[number])
        self.stores[number].restore(tensors, about)
        self.incarnations[number] += 1

    def look_after(self) -> None:
        """The chief tells restarted servers who is there, and reopens lost work items."""
        for store in self.stores:
            with store.lock:
                store.fence(self.generations)
            self.queue += [p for p in self.work_items if not store.applied(p) and self._is_free(p)]

    def snapshot(self, number: int) -> None:
        self.snapshots[number] = deepcopy(self.stores[number].dump())

    # Work

    def act(self, process: Process) -> None:
        """The next message of a process, if it has work and nobody keeps it waiting."""
        if process.work_item is None:
            if not self.queue:
                return
            process.work_item = self.queue.pop(0)
            process.pull()
        what, number = process.todo[0]
        store = self.stores[number]
        if store.generations.get(process.worker, 0) < process.generation:
            return  # it was started again: nobody is let in yet
        store.check(process.worker, process.generation)
        if (
            process.incarnations.setdefault(number, self.incarnations[number])
            != self.incarnations[number]
        ):
            process.incarnations[number] = self.incarnations[number]
            self._give_back(process)
        elif what == "pull":
            self._pull(process, number)
        else:
            self._push(process, number)

    def _pull(self, process: Process, number: int) -> None:
        store = self.stores[number]
        with store.lock:
            if number == 0 and store._gate is not None:
                store._gate.ask(process.worker)
                if process.worker not in store._gate.grantable():
                    return
                store.admit(process.worker)
        process.pulled[number] = store.version
        process.todo.pop(0)

    def _push(self, process: Process, number: int) -> None:
        assert process.work_item is not None
        store = self.stores[number]
        sent = push(0, keys=[process.work_item], pulled=process.pulled[number])
        with store.lock:
            outcome, staleness = store.push(process.worker, sent, store.shard.values.clone())
        if outcome is Outcome.APPLIED:
            assert 0 <= staleness <= (self.rules.max_staleness or 0)
        process.stale |= outcome is Outcome.STALE
        process.todo.pop(0)
        if not process.todo:
            if process.stale:
                process.pull()  # computed again with new values
            else:
                process.work_item = None

    def _give_back(self, process: Process) -> None:
        if process.work_item is not None and process.work_item not in self.queue:
            self.queue.append(process.work_item)
        process.work_item, process.todo = None, []

    def _is_free(self, work_item: Key) -> bool:
        return work_item not in self.queue and all(
            one.work_item != work_item for one in self.processes
        )

    def is_done(self) -> bool:
        return all(
            store.applied(work_item) for store in self.stores for work_item in self.work_items
        )


def numbers(*stores: Store) -> list[Any]:
    return [(store.version, store.work_items, store._gate and deepcopy(vars(store._gate)))
            for store in stores]  # fmt: skip


EVENTS = ["act"] * 3 + ["step"] * 6 + ["come", "lose", "restart", "snapshot", "look", "old"]


@settings(max_examples=150, deadline=None)
@given(workers=st.integers(1, 4), limit=st.integers(1, 3), seed=st.integers(0, 1 << 32))
def test_no_server_applies_a_push_beyond_the_bound_or_of_a_process_that_was_replaced(
    workers: int, limit: int, seed: int
) -> None:
    cluster = Cluster(workers, limit, work_items=40)
    dice = Random(seed)
    for _ in range(120):
        what, number = dice.choice(EVENTS), dice.randrange(6)
        process = cluster.processes[number % workers]
        if what in ("act", "step"):  # one message, or as many as an update takes
            for _ in range(4 if what == "step" else 1):
                cluster.act(process)
        elif what == "come":
            cluster.come(process.worker)
        elif what == "lose":
            cluster.lose(process)
        elif what == "restart":
            cluster.restart(number % 2)
        elif what == "snapshot":
            cluster.snapshot(number % 2)
        elif what == "look":
            cluster.look_after()
        elif cluster.old:
            old = cluster.old[number % len(cluster.old)]
            before = numbers(*cluster.stores)
            old.work_item = old.work_item or (1, 0, 0, 0)
            old.todo = old.todo or [("push", number % 2)]
            old.pulled.setdefault(number % 2, 0)
            with suppress(UserError):  # or it is not let in
                cluster.act(old)
            assert numbers(*cluster.stores) == before
    for lock in range(2000):
        if lock % 50 == 0:
            cluster.look_after()
        cluster.act(cluster.processes[lock % workers])
        if cluster.is_done():
            break
    assert cluster.is_done()


def test_a_server_that_was_started_again_lets_nobody_in_before_the_chief_has_spoken() -> None:
    store = Bench(Rules(2, 1)).store
    with store.lock:
        with pytest.raises(TimeoutError, match="no word of worker 1"):
            store.wait_for_fence(1, 4, seconds=0.0)
        store.fence({1: 4})
        store.wait_for_fence(1, 4, seconds=0.0)
        with pytest.raises(UserError, match="another process has replaced worker 1"):
            store.wait_for_fence(1, 3, seconds=0.0)
