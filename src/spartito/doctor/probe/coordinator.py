"""The first task: it waits for the others, gives them orders in turn, and gathers the answers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from spartito.cluster.spec import EVALUATOR, canonical, split_address
from spartito.doctor.findings import Report, addresses_of, slow_ways
from spartito.doctor.probe.probes import at_once, knock_all, measure
from spartito.doctor.transport.connection import GarbageError, Talk, meet
from spartito.doctor.transport.messages import (
    End,
    Facts,
    Invite,
    Join,
    Knock,
    Knocked,
    Knocks,
    Measure,
    Measured,
    Message,
    Refused,
    Speed,
    Target,
    Welcome,
)
from spartito.doctor.transport.server import Station

GATHER, MEASURE = 0.6, 0.9
"""When the time limit is so far gone we wait no longer for tasks, and measure no more."""

KNOCK, KNOCK_SECONDS = 0.15, 2.0
"""A connection gets this share of the time limit, and never more than so many seconds."""

MEASURE_SECONDS = 1.0
ANSWER_SECONDS = 0.5
"""One measurement at most, and what its answer may take on top."""

INVITE_SECONDS = 0.5
"""Between two looks for a server that does not come."""

ONE_AT_A_TIME = 16
"""Up to so many tasks pairs take turns; of more, pairs without a common task go together."""

RETRIES = 2
"""How often a way that looks slow is measured again: a busy moment is no slow network."""


class Doctor(Protocol):
    """A task's doctor: us or another; it raises `OSError` or `GarbageError` when it is gone."""

    facts: Facts

    def knock(self, targets: list[Target], seconds: float) -> list[Knocked]:
        """Connect to all ``targets`` at the same time."""

    def measure(self, target: Target, seconds: float) -> Speed | None:
        """Measure the way to ``target``."""


@dataclass
class Own:
    """This task's own doctor."""

    facts: Facts
    key: bytes

    def knock(self, targets: list[Target], seconds: float) -> list[Knocked]:
        """Connect to all ``targets`` at the same time."""
        return knock_all(self.facts.task, targets, seconds, self.key)

    def measure(self, target: Target, seconds: float) -> Speed | None:
        """Measure the way to ``target``."""
        return measure(self.facts.task, target, seconds, self.key)


@dataclass
class Member:
    """Another task's doctor, which hears orders on ``talk``."""

    facts: Facts
    talk: Talk
    host: str
    port: int

    def knock(self, targets: list[Target], seconds: float) -> list[Knocked]:
        """Connect to all ``targets`` at the same time."""
        answer: Knocks = self._ask(Knock(targets, seconds), Knocks, seconds)
        return answer.found

    def measure(self, target: Target, seconds: float) -> Speed | None:
        """Measure the way to ``target``."""
        answer: Measured = self._ask(Measure(target, seconds), Measured, seconds)
        return answer.speed

    def _ask(self, order: Message, answer: Any, seconds: float) -> Any:
        end = time.monotonic() + seconds + ANSWER_SECONDS
        self.talk.say(order, end)
        return self.talk.hear(answer, end)


@dataclass
class Leader:
    """Gathers the `Report` of the cluster that ``facts`` describes, within ``seconds``.

    The others come to ``station``; they reach this task in training at ``own``.
    """

    facts: Facts
    station: Station
    own: Target
    seconds: float
    began: float
    members: dict[str, Member] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    speeds: dict[tuple[str, str], Speed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.addresses = addresses_of(self.facts.cluster)

    def examine(self) -> Report:
        """Wait for all, let them connect to each other, measure pair by pair."""
        self._gather(self.began + GATHER * self.seconds)
        knocks = self._knock(min(KNOCK_SECONDS, KNOCK * self.seconds))
        self._measure([(k.source, k.target) for k in knocks if k.how == "ok"])
        there = self._doctors()
        return Report(
            expected=list(self.addresses),
            addresses=self.addresses,
            leader=self.facts.task,
            facts={name: there[name].facts for name in self.addresses if name in there},
            knocks=knocks,
            speeds=list(self.speeds.values()),
            silent=self.silent,
            refused=self.refused,
            strangers=list(self.station.strangers),
            seconds=time.monotonic() - self.began,
            limit=GATHER * self.seconds,
        )

    def dismiss(self, code: int, words: str) -> None:
        """Tell all how it ended."""
        while not self.station.joins.empty():
            join, talk = self.station.joins.get_nowait()
            with talk, suppress(OSError):
                why = f"{join.facts.task} came too late: {self.facts.task} waited no longer"
                talk.say(Refused(why), time.monotonic() + ANSWER_SECONDS)
        for name, member in self.members.items():
            if name not in self.silent:
                with suppress(OSError):  # one that is gone has said so itself
                    member.talk.say(End(code, words), time.monotonic() + ANSWER_SECONDS)
            member.talk.close()

    def _gather(self, end: float) -> None:
        for task in self.addresses:
            if task.startswith("ps "):
                threading.Thread(target=self._invite, args=(task, end), daemon=True).start()
        while len(self.members) + 1 < len(self.addresses):
            try:
                join, talk = self.station.joins.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return
            why = self._objection(join)
            try:
                left = self.began + self.seconds - time.monotonic()
                answer = Refused(why) if why else Welcome(left)
                talk.say(answer, time.monotonic() + ANSWER_SECONDS)
            except OSError:
                why = why or f"{join.facts.task} came and went away at once"
            if why:
                self.refused.append(why)
                talk.close()
                continue
            task = join.facts.task
            self.addresses.setdefault(task, "")
            self.members[task] = Member(join.facts, talk, join.host, join.port)

    def _invite(self, task: str, end: float) -> None:
        """Go to the parameter server ``task`` unless it comes: training never has it call us."""
        time.sleep(INVITE_SECONDS)
        while task not in self.members and time.monotonic() < end:
            target = self._target(task)
            try:
                if target is not None:
                    self.station.joins.put(_invited(target, end, self.station.key))
                    return
            except (OSError, GarbageError):
                time.sleep(INVITE_SECONDS)  # it does not listen yet, or came meanwhile

    def _objection(self, join: Join) -> str:
        """Why the task that came is none of ours, "" when it is."""
        task = join.facts.task
        if task in self._doctors():
            return f"two processes say that they are {task}; one runs on {join.facts.host}"
        # An evaluator may be left out of the cluster of the others, as in TensorFlow.
        known, theirs = (
            {name: address for name, address in cluster.items() if not name.startswith(EVALUATOR)}
            for cluster in (self.addresses, addresses_of(join.facts.cluster))
        )
        if difference := _difference(known, theirs):
            return f"{task} came with another cluster than {self.facts.task}: {difference}"
        return ""

    def _doctors(self) -> dict[str, Doctor]:
        return {self.facts.task: Own(self.facts, self.station.key), **self.members}

    def _target(self, task: str) -> Target | None:
        """Where the doctor of ``task`` listens, or should; None where nothing tells."""
        address = self.addresses[task]
        host, port = split_address(address) if address else ("", 0)
        if task == self.facts.task:
            return self.own
        member = self.members.get(task)
        if member is not None:
            seen = str(member.talk.connection.getpeername()[0])
            return Target(task, member.host or host or seen, member.port)
        return Target(task, host, port) if address else None

    def _targets(self) -> dict[str, Target]:
        found = {task: self._target(task) for task in self.addresses}
        return {task: target for task, target in found.items() if target is not None}

    def _knock(self, seconds: float) -> list[Knocked]:
        """Everybody connects to everybody, all at the same time."""
        targets = self._targets()

        def ask(doctor: Doctor) -> list[Knocked]:
            name = doctor.facts.task
            others = [target for task, target in targets.items() if task != name]
            try:
                return doctor.knock(others, seconds)
            except (OSError, GarbageError):
                self.silent.append(name)
                return []

        doctors = list(self._doctors().values())
        limit = time.monotonic() + seconds + 2 * ANSWER_SECONDS
        found = at_once(ask, doctors, limit)
        return [knocked for knocks in found for knocked in knocks or []]

    def _measure(self, ways: Sequence[tuple[str, str]]) -> None:
        """Measure ``ways`` in turns, and once more those that look slow."""
        doctors = self._doctors()
        width = 1 if len(doctors) <= ONE_AT_A_TIME else len(doctors) // 2
        machines = {name: doctor.facts.machine for name, doctor in doctors.items()}
        targets, gone = self._targets(), set(self.silent)
        until = self.began + MEASURE * self.seconds

        def turn(pair: tuple[str, str]) -> None:
            for source, target in (pair, pair[::-1]):
                if (source, target) not in wanted or {source, target} & gone:
                    continue
                if until - time.monotonic() < MEASURE_SECONDS / 10:
                    return
                limit = min(MEASURE_SECONDS, until - time.monotonic())
                try:
                    speed = doctors[source].measure(targets[target], limit)
                except (OSError, GarbageError):
                    self.silent.append(source)
                    gone.add(source)
                    return
                if speed is None:
                    gone.add(target)
                else:
                    self._keep(speed)

        with ThreadPoolExecutor(width) as pool:
            wanted = set(ways)
            for _ in range(1 + RETRIES):
                for pairs in rounds(list(doctors)):
                    list(pool.map(turn, pairs))
                wanted = slow_ways(self.speeds.values(), machines)

    def _keep(self, speed: Speed) -> None:
        """The better of what was measured of one way."""
        way = speed.source, speed.target
        old = self.speeds.get(way)
        if old is None:
            self.speeds[way] = speed
            return
        best = min(old, speed, key=lambda one: one.latency)
        bandwidth = max(old.bandwidth, speed.bandwidth)
        self.speeds[way] = Speed(*way, best.latency, bandwidth, best.clock)


def rounds(tasks: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Every pair of ``tasks`` once, in rounds whose pairs have no task in common."""
    players: list[str | None] = [*tasks, *([None] if len(tasks) % 2 else [])]
    half = len(players) // 2
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        players = [players[0], players[-1], *players[1:-1]]


def _invited(target: Target, end: float, key: bytes) -> tuple[Join, Talk]:
    """The task at ``target`` comes in by the connection that we made to it."""
    talk = meet(target.host, target.port, end, key)
    try:
        talk.say(Invite(), end)
        join: Join = talk.hear(Join, end)
    except (OSError, GarbageError):
        talk.close()
        raise
    return join, talk


def _difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Where a task has two addresses, "" where all are the same, however they are written."""
    for task in [*ours, *theirs]:
        here, there = ours.get(task), theirs.get(task)
        if _place(here) != _place(there):
            return f"{task} at {there or 'no address'}, not at {here or 'no address'}"
    return ""


def _place(address: str | None) -> tuple[str, int] | None:
    """The host in its one spelling, and the port; None for a task that is not in the cluster."""
    host, port = split_address(address) if address else ("", 0)
    return None if address is None else (canonical(host), port)
