"""The first task: it waits for the others, gives them orders in turn, and gathers the results."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from spartito.cluster.spec import EVALUATOR
from spartito.doctor.findings import (
    Facts,
    Findings,
    Pair,
    Probe,
    Speed,
    Stuck,
    Target,
    addresses_of,
    needed_pairs,
)
from spartito.doctor.parallel import at_once
from spartito.doctor.probe.probes import carry_out
from spartito.doctor.transport.connection import Connection, PeerError, connect
from spartito.doctor.transport.messages import (
    End,
    Invite,
    Join,
    Measured,
    MeasureOrder,
    Order,
    Probed,
    ProbeOrder,
    Refused,
    Welcome,
)
from spartito.doctor.transport.server import DoctorServer
from spartito.wire.addresses import canonical, split_address
from spartito.wire.secret import Key

GATHER, MEASURE = 0.6, 0.9
"""When so much of the time limit is gone we wait no longer for tasks, and measure no more."""

PROBE, PROBE_SECONDS = 0.15, 2.0
"""A connection gets this fraction of the time limit, and never more than so many seconds."""

MEASURE_SECONDS, REPLY_SECONDS = 1.0, 0.5
"""One measurement at most the first time, and what its reply may take on top."""

LOOK_SECONDS, SECRET_SECONDS = 0.25, 1.5
"""How often to look for tasks with another secret, and how long one must try to join."""

INVITE_SECONDS = 0.5
"""Between two attempts to reach a server that does not come."""

ONE_AT_A_TIME = 16
"""Up to so many tasks pairs take turns; of more, pairs without a common task go together."""

RETRIES = 2
"""How often a pair that may be slow, lets nothing large through, or did not respond in time, is
measured again, with more time: a busy moment is no slow network."""


@dataclass
class Member:
    """Another task that came: what it knows, its connection, and where its doctor listens."""

    facts: Facts
    connection: Connection
    host: str
    port: int


@dataclass
class Coordinator:
    """Gathers the `Findings` of the cluster that ``facts`` describes, within ``seconds``.

    The others come to ``server``; they reach this task in training at ``own``.
    """

    facts: Facts
    server: DoctorServer
    own: Target
    seconds: float
    began: float
    members: dict[str, Member] = field(default_factory=dict)
    unresponsive: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    speeds: dict[Pair, Speed] = field(default_factory=dict)
    stuck: dict[Pair, Stuck] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.addresses = addresses_of(self.facts.cluster)

    def examine(self) -> Findings:
        """Wait for all, let them connect to each other, measure pair by pair."""
        self._gather(self.began + GATHER * self.seconds)
        waited = time.monotonic() - self.began
        probes = self._probe(min(PROBE_SECONDS, PROBE * self.seconds))
        self._measure([(probe.source, probe.target) for probe in probes if probe.ok])
        there = self._facts()
        return Findings(
            expected=list(self.addresses),
            addresses=self.addresses,
            coordinator=self.facts.task,
            facts={task: there[task] for task in self.addresses if task in there},
            probes=probes,
            speeds=list(self.speeds.values()),
            stuck=list(self.stuck.values()),
            unresponsive=list(dict.fromkeys(self.unresponsive)),
            refused=self.refused,
            unknown_peers=list(self.server.unknown_peers),
            other_secrets=list(self.server.other_secrets),
            seconds=time.monotonic() - self.began,
            waited=waited,
        )

    def dismiss(self, code: int, summary: str) -> None:
        """Tell all how it ended."""
        while not self.server.joins.empty():
            join, connection = self.server.joins.get_nowait()
            with connection, suppress(PeerError):
                why = f"{join.facts.task} came too late: {self.facts.task} waited no longer"
                connection.send(Refused(why), time.monotonic() + REPLY_SECONDS)
        for task, member in self.members.items():
            if task not in self.unresponsive:
                with suppress(PeerError):  # one that is gone has said so itself
                    member.connection.send(End(code, summary), time.monotonic() + REPLY_SECONDS)
            member.connection.close()

    def _gather(self, end: float) -> None:
        for task in self.addresses:
            if task.startswith("ps "):
                threading.Thread(target=self._invite, args=(task, end), daemon=True).start()
        while len(self.members) + 1 < len(self.addresses):
            left = end - time.monotonic()
            try:
                join, connection = self.server.joins.get(timeout=min(max(0.0, left), LOOK_SECONDS))
            except queue.Empty:
                if left <= 0 or self._other_secret_stays():
                    return
                continue
            task, why = join.facts.task, self._objection(join.facts)
            try:
                left = self.began + self.seconds - time.monotonic()
                reply = Refused(why) if why else Welcome(left)
                connection.send(reply, time.monotonic() + REPLY_SECONDS)
            except PeerError:
                why = why or f"{task} came and left at once"
            if why:
                self.refused.append(why)
                connection.close()
                continue
            self.addresses.setdefault(task, "")
            self.members[task] = Member(join.facts, connection, join.host, join.port)

    def _other_secret_stays(self) -> bool:
        """Whether a task with another secret tries for so long that it means us."""
        return any(
            newest - first > SECRET_SECONDS
            for first, newest in list(self.server.other_secrets.values())
        )

    def _invite(self, task: str, end: float) -> None:
        """Go to the parameter server ``task`` unless it comes: in training it calls nobody."""
        time.sleep(INVITE_SECONDS)
        while task not in self.members and time.monotonic() < end:
            target = self._target(task)
            if target is None:
                return
            try:
                self.server.joins.put(_invited(target, end, self.server.key))
                return
            except PeerError:
                time.sleep(INVITE_SECONDS)  # it does not listen yet, or came meanwhile

    def _objection(self, theirs: Facts) -> str:
        """Why the task that came is none of ours, "" when it is."""
        if theirs.task in self._facts():
            return f"two processes are {theirs.task}; one runs on {theirs.host}"
        difference = _difference(self.addresses, addresses_of(theirs.cluster))
        if difference:
            return f"{theirs.task} has another cluster than {self.facts.task}: {difference}"
        return ""

    def _facts(self) -> dict[str, Facts]:
        """What all that are here know."""
        others = {task: member.facts for task, member in self.members.items()}
        return {self.facts.task: self.facts, **others}

    def _target(self, task: str) -> Target | None:
        """Where the doctor of ``task`` listens, or should; None where nothing says."""
        if task == self.facts.task:
            return self.own
        address = self.addresses[task]
        host, port = split_address(address) if address else ("", 0)
        member = self.members.get(task)
        if member is not None:
            seen = member.connection.host
            return Target(task, member.host or host or seen, member.port)
        return Target(task, host, port) if address else None

    def _targets(self) -> dict[str, Target]:
        found = {task: self._target(task) for task in self.addresses}
        return {task: target for task, target in found.items() if target is not None}

    def _ask(self, task: str, order: Order) -> Probed | Measured | None:
        """What came of ``order`` to a task, maybe ourselves; None if it stopped responding."""
        if task == self.facts.task:
            return carry_out(order, task, self.server.key)
        connection, end = self.members[task].connection, time.monotonic() + order.seconds
        try:
            connection.send(order, end + REPLY_SECONDS)
            done: Probed | Measured = connection.receive(Probed | Measured, end + REPLY_SECONDS)
        except PeerError:
            self.unresponsive.append(task)
            return None
        return done

    def _probe(self, seconds: float) -> list[Probe]:
        """Everybody connects to everybody, all at the same time."""
        targets = self._targets()

        def ask(task: str) -> list[Probe]:
            others = [target for name, target in targets.items() if name != task]
            done = self._ask(task, ProbeOrder(others, seconds))
            return done.probes if isinstance(done, Probed) else []

        limit = time.monotonic() + seconds + 2 * REPLY_SECONDS
        return [p for probes in at_once(ask, list(self._facts()), limit) for p in probes or []]

    def _measure(self, pairs: Iterable[Pair]) -> None:
        """Measure ``pairs`` in turns, what training uses first, and again those that look bad."""
        tasks = list(self._facts())
        width = 1 if len(tasks) <= ONE_AT_A_TIME else len(tasks) // 2
        targets, gone = self._targets(), set[str]()
        until = self.began + MEASURE * self.seconds
        needed = needed_pairs(self.addresses, self._facts())
        needed |= {pair[::-1] for pair in needed}
        there = everywhere = set(pairs)

        def turn(pair: Pair) -> None:
            for source, target in (pair, pair[::-1]):
                left = until - time.monotonic()
                if (source, target) not in wanted or {source, target} & gone:
                    continue
                if left < MEASURE_SECONDS / 10:
                    return
                order = MeasureOrder(targets[target], min(seconds, left))
                done = self._ask(source, order)
                if not isinstance(done, Measured):
                    gone.add(source)
                    return
                if done.speed is not None:
                    self._keep(done.speed)
                    self.stuck.pop((source, target), None)
                elif done.stuck:
                    self.stuck[source, target] = Stuck(source, target, done.stuck)
                else:
                    gone.add(target)

        with ThreadPoolExecutor(width) as pool:
            for attempt in range(1 + RETRIES):
                seconds, gone = MEASURE_SECONDS * (1 + attempt), set(self.unresponsive)
                for wanted in (there & needed, there - needed):
                    for together in rounds(tasks) if wanted else ():
                        list(pool.map(turn, together))
                there = {speed.pair for speed in self.speeds.values() if speed.may_be_slow}
                there |= everywhere - self.speeds.keys()

    def _keep(self, speed: Speed) -> None:
        """The better of what was measured of one pair."""
        old = self.speeds.get(speed.pair, speed)
        best = min(old, speed, key=lambda one: one.latency)
        bandwidth = max(old.bandwidth, speed.bandwidth)
        self.speeds[speed.pair] = Speed(*speed.pair, best.latency, bandwidth, best.clock)


def rounds(tasks: Sequence[str]) -> Iterator[list[Pair]]:
    """Every pair of ``tasks`` once, in rounds whose pairs have no task in common."""
    players: list[str | None] = [*tasks, *([None] if len(tasks) % 2 else [])]
    half = len(players) // 2
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        players = [players[0], players[-1], *players[1:-1]]


def _invited(target: Target, end: float, key: Key) -> tuple[Join, Connection]:
    """The task at ``target`` comes in by the connection that we made to it."""
    connection = connect(target, end, key)
    try:
        connection.send(Invite(), end)
        return connection.receive(Join, end), connection
    except PeerError:
        connection.close()
        raise


def _difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Where a task has two addresses, "" where all are the same, however they are written."""
    for task in [*ours, *theirs]:
        # An evaluator may be left out of the cluster of the others, as in TensorFlow.
        here, there = ours.get(task), theirs.get(task)
        if not task.startswith(EVALUATOR) and _endpoint(here) != _endpoint(there):
            return f"{task} at {there or 'no address'}, not at {here or 'no address'}"
    return ""


def _endpoint(address: str | None) -> tuple[str, int] | None:
    """The host in its one spelling, and the port; None for a task that is not in the cluster."""
    host, port = split_address(address) if address else ("", 0)
    return None if address is None else (canonical(host), port)
