"""All that the doctors of one cluster found, as one value, and what follows from it at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

import msgspec

from spartito.cluster.spec import REPLICA_ROLES, ROLES, machine_of, split_address
from spartito.collectives.placement import calls
from spartito.doctor.transport.messages import OK, Facts, Knocked, Speed

SLOW_FACTOR = 5.0
"""A way is slow when it takes so many times what the median way takes."""

SLOW_LATENCY = 1e-3
"""Seconds that are never slow, whatever the others need."""

FAST_BANDWIDTH = 1.25e8
"""Bytes per second that are never slow, whatever the others reach: 1 Gbit/s."""


class Report(msgspec.Struct, frozen=True):
    """Who was expected, who came, and what they found; ``leader`` gathered it."""

    expected: list[str]
    addresses: dict[str, str]
    """``host:port`` of each expected task, "" where the cluster gives none."""
    leader: str
    facts: dict[str, Facts]
    """Of each task that came."""
    knocks: list[Knocked] = []
    speeds: list[Speed] = []
    silent: list[str] = []
    """Came, and stopped answering."""
    refused: list[str] = []
    """Why some that came were not let in."""
    strangers: list[str] = []
    """Addresses of programs that knocked and are no doctors."""
    seconds: float = 0.0
    """What the examination took."""
    limit: float = 0.0
    """Seconds that tasks were waited for."""

    @property
    def absent(self) -> list[str]:
        """Those that did not come."""
        return [task for task in self.expected if task not in self.facts]

    @property
    def hosts(self) -> set[str]:
        """The hosts that the addresses name; all loopback names are one."""
        hosts = (split_address(address)[0] for address in self.addresses.values() if address)
        return {machine_of(host) for host in hosts}

    @property
    def slow(self) -> set[tuple[str, str]]:
        """The ways, as (source, target), that are far slower than the others of their kind."""
        return slow_ways(self.speeds, {name: facts.machine for name, facts in self.facts.items()})

    @property
    def needed(self) -> set[tuple[str, str]]:
        """The ways, as (source, target), that training goes; others may be closed."""
        replicas = [t for t in self.expected if t.partition(" ")[0] in REPLICA_ROLES]
        servers = [task for task in self.expected if task.startswith("ps ")]
        if servers:
            return {(task, replicas[0]) for task in replicas[1:]} | {
                (task, server) for task in replicas for server in servers
            }
        known = {task: self.facts[task].ipc for task in replicas if task in self.facts}
        first = next(iter(self.facts.values()), None)
        found = calls(
            [known.get(task, task) for task in replicas],
            group=first is not None and first.group,
            share=first is None or first.share,
        )
        return {(replicas[source], replicas[target]) for source, target in found}

    def found(self, source: str, target: str) -> Knocked | None:
        """What came of the way from ``source`` to ``target``, None if nobody tried."""
        return next((k for k in self.knocks if (k.source, k.target) == (source, target)), None)

    def reaches(self, source: str, target: str) -> bool:
        """Whether ``target`` answered ``source``."""
        knocked = self.found(source, target)
        return knocked is not None and knocked.how == OK

    def clock(self, task: str) -> float | None:
        """Seconds by which the clock of ``task`` is ahead of the leader's, None if unknown."""
        for speed in self.speeds:
            if (speed.source, speed.target) == (self.leader, task):
                return speed.clock
            if (speed.source, speed.target) == (task, self.leader):
                return -speed.clock
        return 0.0 if task == self.leader else None


def addresses_of(cluster: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Every task of a cluster by its name, with its address."""
    return {
        f"{role} {index}": address
        for role in ROLES
        for index, address in enumerate(cluster.get(role, ()))
    }


def slow_ways(speeds: Iterable[Speed], machines: Mapping[str, str]) -> set[tuple[str, str]]:
    """Which (source, target) are slow against the median of at least three like them.

    Ways inside of a machine and ways between machines are two kinds.
    """
    kinds: dict[bool, list[Speed]] = {True: [], False: []}
    for speed in speeds:
        inside = machines.get(speed.source) == machines.get(speed.target)
        kinds[inside].append(speed)
    slow = set()
    for ways in kinds.values():
        if len(ways) < 3:
            continue
        latency = max(SLOW_LATENCY, SLOW_FACTOR * median(way.latency for way in ways))
        bandwidth = min(FAST_BANDWIDTH, median(way.bandwidth for way in ways) / SLOW_FACTOR)
        slow |= {
            (way.source, way.target)
            for way in ways
            if way.latency > latency or way.bandwidth < bandwidth
        }
    return slow
