"""Many steps of a job, task by task: steps that vary, machines that differ, queues at servers.

A closed form gives the mean of a step; this gives each task's, with who waits for whom. What a task
does by itself varies as it was measured, and goes at the speed of its machine. Pure: the same seed
gives the same steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean

from spartito.planning.costs.parts import (
    COMPUTE,
    INPUT,
    OTHERS,
    OVERHEAD,
    SERVERS,
    UPDATE,
    Cost,
)
from spartito.planning.search import Choice

STEPS = 60
"""Of each task."""
LEAST_MEETINGS = 3
"""Of all groups: where they meet seldom there are more steps."""
MOST = 2_000_000
"""Steps of all tasks together; with more tasks there are fewer of each."""
SHOWN_TASKS, SHOWN_STEPS = 8, 3
OWN = (INPUT, COMPUTE, UPDATE, OVERHEAD)
"""What varies, and goes at the speed of a machine."""


@dataclass(frozen=True, slots=True)
class Span:
    """What a task did from one moment to another, in seconds; a name of `WAITS`."""

    task: int
    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came of it.

    Attributes:
        rate: Examples a second of all tasks.
        waiting: The part of their time in which tasks wait for others, or for servers.
        spans: What the first tasks did in their first steps.
    """

    rate: float
    waiting: float
    spans: Sequence[Span]


def simulate(choice: Choice, seed: int = 0) -> Simulated:
    """Run a strategy on its cluster.

    Args:
        choice: As `predict` makes it.
        seed: Of the variation.

    Returns:
        Speeds and waits; failures are not among what happens.
    """
    situation = choice.situation
    cluster = situation.cluster
    slowness = [
        cluster.slowest / kind.speed
        for kind in cluster.kinds
        for _ in range(kind.count * cluster.workers)
    ]
    rhythm = choice.cost.rhythm
    wanted = max(STEPS, LEAST_MEETINGS * rhythm.every)
    steps = max(rhythm.every, min(wanted, MOST // len(slowness)))
    job = _Job(
        choice.cost, slowness, situation.profile.deviation(cluster.threads), steps, Random(seed)
    )
    elapsed = job.served() if rhythm.served else job.met()
    done = choice.cost.examples / len(slowness) * job.made
    return Simulated(done / elapsed, job.waited / (elapsed * len(slowness)), job.spans)


@dataclass
class _Job:
    """The tasks of one simulation, and what they have done so far."""

    cost: Cost
    slowness: Sequence[float]
    deviation: float
    steps: int
    random: Random
    made: float = 0.0
    waited: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.cost.rhythm.group or len(self.slowness)
        self._groups = [
            range(first, min(first + size, len(self.slowness)))
            for first in range(0, len(self.slowness), size)
        ]
        found = self.cost.seconds
        self._own = {name: found[name] for name in OWN if name in found}
        waits = {OTHERS, SERVERS}
        self._moves = {n: s for n, s in found.items() if n not in waits and n not in OWN}

    def met(self) -> float:
        """Tasks of a group meet in every step, and all groups now and then; returns the end."""
        clocks = [0.0] * len(self._groups)
        for step in range(1, self.steps + 1):
            clocks = [
                self._together(members, clock, step)
                for members, clock in zip(self._groups, clocks, strict=True)
            ]
            if step % self.cost.rhythm.every == 0:
                latest = max(clocks)
                for members, clock in zip(self._groups, clocks, strict=True):
                    self._wait(members, step, OTHERS, clock, latest)
                clocks = [latest] * len(clocks)
        self.made = self.steps * len(self.slowness)
        return fmean(clocks)

    def served(self) -> float:
        """A group pushes after its steps, and waits until the servers have had all before it.

        All do so for the same time, which is returned: who is quicker makes more steps. Of a step
        that is not through then, the part that is counts.
        """
        rhythm = self.cost.rhythm
        every, served = rhythm.every, rhythm.served
        end, free = self.steps * self.cost.step, 0.0
        counts = [0] * len(self._groups)
        queue = [(0.0, 0.0, number) for number in range(len(self._groups))]
        while queue:
            clock, begun, number = heapq.heappop(queue)
            members, step = self._groups[number], counts[number]
            if step and step % every == 0:
                taken = max(clock, free)
                free = taken + rhythm.occupied
                self._wait(members, step, SERVERS, clock, taken + served)
                clock = taken + served
            if step:
                self.made += len(members) * min(1.0, (end - begun) / (clock - begun))
            if clock < end:
                counts[number] += 1
                ready = self._together(members, clock, counts[number])
                heapq.heappush(queue, (ready, clock, number))
        return end

    def _together(self, members: range, begin: float, step: int) -> float:
        """A step of tasks that meet after what each does by itself; returns its end."""
        ends = []
        for task in members:
            clock, varies = begin, max(0.0, self.random.gauss(1.0, self.deviation))
            for name, seconds in self._own.items():
                own = seconds * self.slowness[task] * varies
                self._show((task,), step, name, clock, clock + own)
                clock += own
            ends.append(clock)
        latest = max(ends)
        for task, end in zip(members, ends, strict=True):
            self._wait((task,), step, OTHERS, end, latest)
        for name, seconds in self._moves.items():
            self._show(members, step, name, latest, latest + seconds)
            latest += seconds
        return latest

    def _wait(self, tasks: Sequence[int], step: int, name: str, begin: float, end: float) -> None:
        self.waited += (end - begin) * len(tasks)
        self._show(tasks, step, name, begin, end)

    def _show(self, tasks: Sequence[int], step: int, name: str, begin: float, end: float) -> None:
        if step <= SHOWN_STEPS and end > begin:
            self.spans += [Span(task, name, begin, end) for task in tasks if task < SHOWN_TASKS]
