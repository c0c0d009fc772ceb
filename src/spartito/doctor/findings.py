"""The values that the doctors of a cluster collect, and what follows from them at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from statistics import median

import msgspec

from spartito.cluster.spec import REPLICA_ROLES, ROLES
from spartito.collectives.membership.placement import calls
from spartito.wire.addresses import machine_of, split_address

SLOW_FACTOR = 5.0
"""A connection is slow when it takes so many times what the median one takes."""

ONE_WAY_FACTOR = 10.0
"""A direction is slow that carries so many times less than its reverse."""

SLOW_LATENCY = 1e-3
"""Seconds that are never slow, whatever the others need."""

FAST_BANDWIDTH = 1.25e8
"""Bytes per second that are never slow, whatever the others reach: 1 Gbit/s."""

Pair = tuple[str, str]
"""The task that connects, and the task that it connects to."""


class Name(msgspec.Struct, frozen=True):
    """What a host's name means on one task; ``error`` when it means nothing there."""

    host: str
    addresses: list[str] = []
    error: str = ""


class Route(msgspec.Struct, frozen=True):
    """How packets leave a task for ``host``: the interface and our own address on it."""

    host: str
    interface: str
    source: str


class Port(msgspec.Struct, frozen=True):
    """The port at which a task is to listen: ``holder`` has it unless it is ``free``.

    ``agent``: torchrun's own agent has it, as it should. ``foreign``: its host is no address of
    the task's machine. ``last``: where all of an allowed range are taken, the end of that range.
    ``drawn``: the port that the system gave instead, where that will do.
    """

    number: int
    free: bool
    holder: str = ""
    agent: bool = False
    foreign: bool = False
    last: int = 0
    drawn: int = 0


class Memory(msgspec.Struct, frozen=True):
    """Bytes of a task's machine; ``limit`` is its cgroup's, None where there is none."""

    total: int
    available: int
    limit: int | None = None


class Space(msgspec.Struct, frozen=True):
    """Bytes of a file system."""

    path: str
    size: int
    free: int


class Facts(msgspec.Struct, frozen=True):
    """What one task knows about itself and its machine.

    Tasks with equal ``machine`` run under one kernel; with equal ``network`` they have one
    loopback; with equal ``cpus`` they compete for the same cores; with equal ``ipc`` they can
    share memory. ``plan`` says what training would do, by the cluster that ``source`` describes;
    ``refusal`` why it would not begin to listen. ``quota`` is in cores, None without one.
    ``gpus`` are accelerators of any kind, with ``backend`` of torch's process groups for them.
    ``process_group``: replicas would form one, of gloo or that backend. ``shared_memory``: replicas
    that can share memory would. ``port`` is None where nothing says which one.
    """

    task: str
    host: str
    machine: str
    network: str
    cpus: str
    ipc: str
    source: str
    plan: str
    remarks: list[str]
    cluster: dict[str, list[str]]
    python: str
    versions: dict[str, str]
    cores: int
    quota: float | None
    omp_num_threads: str | None
    memory: Memory
    shm: Space | None
    disks: list[Space]
    gpus: list[str]
    backend: str = ""
    process_group: bool = False
    shared_memory: bool = True
    refusal: str = ""
    port: Port | None = None
    names: list[Name] = []
    routes: list[Route] = []


class Target(msgspec.Struct, frozen=True):
    """Where a task's doctor listens."""

    task: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """Host and port as one word."""
        return f"{self.host}:{self.port}"


class Outcome(StrEnum):
    """What may come of a connection."""

    OK = "ok"
    UNRESOLVED = "unresolved"
    REFUSED = "refused"
    DROPPED = "dropped"
    UNROUTABLE = "unroutable"
    SILENT = "silent"
    OTHER_PROGRAM = "other program"
    OTHER_SECRET = "other secret"
    OTHER_RELEASE = "other release"
    CLOSED = "closed"
    OTHER_TASK = "other task"


class Finding(msgspec.Struct, frozen=True):
    """Something of the way from one task to another."""

    source: str
    target: str

    @property
    def pair(self) -> Pair:
        """Source and target."""
        return self.source, self.target


class Probe(Finding, frozen=True):
    """What came of one task's connection to another."""

    address: str
    outcome: Outcome
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the target's doctor responded."""
        return self.outcome is Outcome.OK


class Speed(Finding, frozen=True):
    """One direction of a pair: seconds of the fastest round trip, bytes per second from source
    to target, and seconds by which the target's clock is ahead of the source's.
    """

    latency: float
    bandwidth: float
    clock: float

    @property
    def may_be_slow(self) -> bool:
        """Whether it is not fast whatever the others reach."""
        return self.latency > SLOW_LATENCY or self.bandwidth < FAST_BANDWIDTH


class Stuck(Finding, frozen=True):
    """From source to target small messages arrive, and one of ``size`` bytes does not."""

    size: int


class Findings(msgspec.Struct, frozen=True):
    """Who was expected, who came, and what they found; ``coordinator`` gathered it.

    ``addresses`` has ``host:port`` of each task, "" where the cluster gives none; ``facts`` those
    who came. ``unresponsive`` came and stopped responding; ``refused`` says why some that came
    were not let in; ``unknown_peers`` are the addresses of callers that are no tasks of Spartito,
    ``other_secrets`` of tasks that have another secret. ``seconds`` is what all of it took,
    ``waited`` how long tasks had to come.
    """

    expected: list[str]
    addresses: dict[str, str]
    coordinator: str
    facts: dict[str, Facts]
    probes: list[Probe] = []
    speeds: list[Speed] = []
    stuck: list[Stuck] = []
    unresponsive: list[str] = []
    refused: list[str] = []
    unknown_peers: list[str] = []
    other_secrets: list[str] = []
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def missing(self) -> list[str]:
        """Those that did not come."""
        return [task for task in self.expected if task not in self.facts]

    @property
    def responsive(self) -> list[str]:
        """Those that came and still respond."""
        return [task for task in self.facts if task not in self.unresponsive]

    @property
    def hosts(self) -> set[str]:
        """The hosts that the addresses name; all loopback names are one."""
        return {machine_of(self.host(task)) for task in self.addresses if self.host(task)}

    def host(self, task: str) -> str:
        """The host of the task's address, "" where the cluster gives none."""
        address = self.addresses.get(task)
        return split_address(address)[0] if address else ""

    @property
    def slow(self) -> set[Pair]:
        """The pairs that are far slower than the others of their kind."""
        return slow_pairs(self.speeds, {name: facts.machine for name, facts in self.facts.items()})

    @property
    def needed(self) -> set[Pair]:
        """The connections that training makes; others may be closed."""
        return needed_pairs(self.expected, self.facts)

    def uses(self, pair: Pair) -> bool:
        """Whether training sends something from the first to the second: both send to each other.

        Args:
            pair: Two tasks.
        """
        return not self.needed.isdisjoint({pair, pair[::-1]})

    def probe(self, source: str, target: str) -> Probe | None:
        """What came of the connection from ``source`` to ``target``, None if nobody tried."""
        return next((p for p in self.probes if (p.source, p.target) == (source, target)), None)

    def clock(self, task: str) -> float | None:
        """Seconds by which the clock of ``task`` is ahead of the coordinator's, None if unknown."""
        for speed in self.speeds:
            if speed.pair == (self.coordinator, task):
                return speed.clock
            if speed.pair == (task, self.coordinator):
                return -speed.clock
        return 0.0 if task == self.coordinator else None


def needed_pairs(expected: Iterable[str], facts: Mapping[str, Facts]) -> set[Pair]:
    """The connections that training makes between the ``expected`` tasks, by what is known."""
    replicas = [task for task in expected if task.partition(" ")[0] in REPLICA_ROLES]
    servers = [task for task in expected if task.startswith("ps ")]
    if servers:
        return {(task, replicas[0]) for task in replicas[1:]} | {
            (task, server) for task in replicas for server in servers
        }
    known = {task: facts[task].ipc for task in replicas if task in facts}
    first = next(iter(facts.values()), None)
    found = calls(
        [known.get(task, task) for task in replicas],
        group=first is not None and first.process_group,
        share=first is None or first.shared_memory,
    )
    return {(replicas[source], replicas[target]) for source, target in found}


def addresses_of(cluster: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Every task of a cluster by its name, with its address."""
    return {
        f"{role} {index}": address
        for role in ROLES
        for index, address in enumerate(cluster.get(role, ()))
    }


def slow_pairs(speeds: Iterable[Speed], machines: Mapping[str, str]) -> set[Pair]:
    """Which pairs are slow against their reverse, or the median of at least three like them.

    Pairs inside of a machine and pairs between machines are two kinds.
    """
    speeds = list(speeds)
    kinds: dict[bool, list[Speed]] = {True: [], False: []}
    for speed in speeds:
        kinds[machines.get(speed.source) == machines.get(speed.target)].append(speed)
    slow = {speed.pair for speed in speeds if slower_than_back(speed, speeds)}
    for alike in kinds.values():
        if len(alike) < 3:
            continue
        latency = max(SLOW_LATENCY, SLOW_FACTOR * median(one.latency for one in alike))
        bandwidth = min(FAST_BANDWIDTH, median(one.bandwidth for one in alike) / SLOW_FACTOR)
        slow |= {s.pair for s in alike if s.latency > latency or s.bandwidth < bandwidth}
    return slow


def slower_than_back(speed: Speed, speeds: Iterable[Speed]) -> Speed | None:
    """The reverse of ``speed`` among ``speeds``, where that is far faster; else None."""
    back = next((one for one in speeds if one.pair == speed.pair[::-1]), None)
    if back is None or speed.bandwidth >= min(FAST_BANDWIDTH, back.bandwidth / ONE_WAY_FACTOR):
        return None
    return back
