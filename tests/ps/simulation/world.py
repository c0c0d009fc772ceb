"""A job in virtual time: its processes, and what happens to them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tests.ps.simulation.scheduler import Process, Stuck
from tests.ps.simulation.state import Failure
from tests.ps.simulation.tasks import Tasks


class World(Tasks):
    """A whole job, whose seed says what goes wrong."""

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
