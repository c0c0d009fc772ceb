"""Virtual time: processes whose tasks (greenlets) take turns, in an order drawn by seed."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextlib import AbstractContextManager
from random import Random
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from spartito.ps.protocol.runtime import Condition, Event, Joinable, Runtime


class Stuck(Exception):
    """Nobody can go on, or the virtual time is over."""


class Task:
    """One thread of a simulated process."""

    def __init__(self, process: Process, target: Callable[[], None], name: str) -> None:
        self.process, self.name = process, name
        self.done = False
        self.turn = 0  # a wake-up for an earlier one is void
        self.woken = False
        self.joining: list[Task] = []
        self.client: Process | None = None  # whose connection it serves
        self.greenlet = greenlet(lambda: self._run(target))

    def _run(self, target: Callable[[], None]) -> None:
        try:
            if not self.process.dead():
                target()
        except GreenletExit:
            pass
        except BaseException as error:
            self.process.simulation.crashed(self, error)
        finally:
            self.done = True
            for task in self.joining:
                self.process.simulation.wake(task)

    def join(self, timeout: float | None = None) -> None:
        simulation = self.process.simulation
        while not self.done:
            self.joining.append(simulation.current)
            if not simulation.park(timeout) and timeout is not None:
                return


class Simulation:
    """The clock, and whose turn it is."""

    def __init__(self, random: Random, limit: float) -> None:
        self.random, self.limit = random, limit
        self.now = 0.0
        self.crashes: list[tuple[Task, BaseException]] = []
        self._queue: list[tuple[float, float, int, Task, int, bool]] = []
        self._count = 0
        self._tasks: dict[greenlet, Task] = {}
        self._hub = getcurrent()

    @property
    def current(self) -> Task:
        return self._tasks[getcurrent()]

    def start(self, process: Process, target: Callable[[], None], name: str) -> Task:
        task = Task(process, target, name)
        self._tasks[task.greenlet] = task
        process.tasks.append(task)
        self._push(0.0, task)
        return task

    def park(self, timeout: float | None = None) -> bool:
        """Let others run until woken (True) or ``timeout`` has passed (False)."""
        task = self.current
        if task.process.dead():
            raise GreenletExit
        task.turn += 1
        task.woken = False
        if timeout is not None:
            self._push(max(0.0, timeout), task)
        self._hub.switch()
        task.turn += 1
        if task.process.dead():
            raise GreenletExit
        return task.woken

    def wake(self, task: Task) -> None:
        self._push(0.0, task, woken=True)

    def run(self, over: Callable[[], bool]) -> None:
        """Give turns until ``over``; `Stuck` if that never comes."""
        while not over():
            if not self._queue:
                raise Stuck("everybody waits")
            at, _, _, task, turn, woken = heapq.heappop(self._queue)
            if turn != task.turn or task.done:
                continue
            process = task.process
            if process.frozen_until > at and not process.dead():
                delay = process.frozen_until - self.now
                self._push(delay, task, woken)
                continue
            self.now = max(self.now, at)
            if self.now > self.limit:
                raise Stuck(f"not done after {self.limit:g} s")
            task.woken = woken
            task.greenlet.switch()
            if task.greenlet.dead:
                self._tasks.pop(task.greenlet, None)

    def crashed(self, task: Task, error: BaseException) -> None:
        self.crashes.append((task, error))

    def _push(self, delay: float, task: Task, woken: bool = False) -> None:
        self._count += 1
        entry = (self.now + delay, self.random.random(), self._count, task, task.turn, woken)
        heapq.heappush(self._queue, entry)


class Process(Runtime):
    """One process of the job, and all that it takes from its system."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.name = simulation, name
        self._dead = False
        self.frozen_until = 0.0
        self.tasks: list[Task] = []
        self.at_death: list[Callable[[], None]] = []

    def kill(self) -> None:
        """As SIGKILL: nothing of it runs any more, and its connections end."""
        if self._dead:
            return
        self._dead = True
        for action in self.at_death:
            action()
        for task in self.tasks:
            if not task.done:
                self.simulation.wake(task)

    def dead(self) -> bool:
        return self._dead

    @property
    def ended(self) -> bool:
        return all(task.done for task in self.tasks)

    def now(self) -> float:
        return self.simulation.now

    def sleep(self, seconds: float) -> None:
        self.simulation.park(seconds)

    def lock(self) -> AbstractContextManager[Any]:
        return Turns(self.simulation)

    def condition(self) -> Condition:
        return Turns(self.simulation)

    def event(self) -> Event:
        return Flag(self.simulation)

    def current(self) -> Joinable:
        return self.simulation.current

    def start(self, target: Callable[[], None], name: str, daemon: bool = True) -> Task:
        return self.simulation.start(self, target, f"{self.name} {name}")


class Turns:
    """A lock that its owner may take again, and a condition on it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []
        self._blocked: list[Task] = []

    def __enter__(self) -> bool:
        self._take(1)
        return True

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._release()

    def wait(self, timeout: float | None = None) -> bool:
        task, depth = self._simulation.current, self._depth
        assert self._owner is task, "wait without the lock"
        self._waiting.append(task)
        self._release()
        try:
            return self._simulation.park(timeout)
        finally:
            if task in self._waiting:
                self._waiting.remove(task)
            if not task.process.dead():
                self._take(depth)
            else:
                self._owner, self._depth = task, depth

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end = None if timeout is None else self._simulation.now + timeout
        while not predicate():
            left = None if end is None else end - self._simulation.now
            if left is not None and left <= 0:
                return predicate()
            self.wait(left)
        return True

    def notify_all(self) -> None:
        for task in self._waiting:
            self._simulation.wake(task)
        self._waiting = []

    def _take(self, depth: int) -> None:
        task = self._simulation.current
        while self._owner is not None and self._owner is not task:
            if self._owner.done:
                break
            self._blocked.append(task)
            self._simulation.park()
        self._owner = task
        self._depth = depth if depth > 1 else self._depth + 1

    def _release(self) -> None:
        self._owner, self._depth = None, 0
        for task in self._blocked:
            self._simulation.wake(task)
        self._blocked = []


class Flag:
    """An event."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for task in self._waiting:
            self._simulation.wake(task)
        self._waiting = []

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else self._simulation.now + timeout
        while not self._set:
            left = None if end is None else end - self._simulation.now
            if left is not None and left <= 0:
                break
            self._waiting.append(self._simulation.current)
            self._simulation.park(left)
        return self._set
