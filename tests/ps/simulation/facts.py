"""What a schedule is made of: who is in the job, how it trains, and what happens to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from spartito.ps.protocol.rules import Rules
from tests.ps.simulation.network import Faults


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
