"""Any other task: it comes to the one that leads, and does what it is told."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

from spartito.cluster.spec import split_address
from spartito.doctor.findings import Report, addresses_of
from spartito.doctor.probe.probes import knock_all, measure
from spartito.doctor.transport.connection import GarbageError, Talk, meet
from spartito.doctor.transport.messages import (
    OK,
    End,
    Facts,
    Join,
    Knock,
    Knocked,
    Knocks,
    Measure,
    Measured,
    Order,
    Refused,
    Target,
    Welcome,
)
from spartito.doctor.transport.server import Station

RETRY_SECONDS = 0.05  # between two looks for a leader that does not listen yet
KNOCK_SECONDS = 1.0
GRACE_SECONDS = 1.0
"""How long after the leader's time limit its last word may come."""


def follow(
    facts: Facts, station: Station, host: str, leader: Sequence[Target], end: float
) -> End | Report:
    """Come to the ``leader``, who listens at one of these, and obey until it says `End`.

    Where only it can come to us, as to a parameter server, we follow its invitation.

    Others reach our ``station`` at ``host``, "" for the address that the leader sees.

    The `Report` is what we can tell alone, when the leader does not come until ``end``, does
    not let us in, or falls silent.
    """
    alone_at = max(end - KNOCK_SECONDS - RETRY_SECONDS, (time.monotonic() + end) / 2)
    talk = None
    while talk is None:
        why = OK
        for target in leader:
            talk = _invited(facts, station, host, end)
            if talk is not None:
                break
            limit = min(KNOCK_SECONDS, end - time.monotonic())
            (found,) = knock_all(facts.task, [target], limit, station.key)
            if found.how == OK:
                talk = _join(Join(facts, station.port, host), target, end, station.key)
                break
            why = found.how if target == leader[0] else why
        if talk is None:
            if time.monotonic() >= alone_at:
                report = _alone(facts, station.key, leader[0], why)
                # The others look who is there at about the same time: be there.
                time.sleep(max(0.0, end - time.monotonic()))
                return report
            time.sleep(RETRY_SECONDS)
    with talk:
        try:
            return _obey(facts, station.key, talk, leader[0], end)
        except (OSError, GarbageError):
            return _alone(facts, station.key, leader[0], "silent", came=True)


def _invited(facts: Facts, station: Station, host: str, end: float) -> Talk | None:
    """The connection on which the leader has asked us to come in, and we have."""
    try:
        talk = station.invites.get_nowait()
        talk.say(Join(facts, station.port, host), end)
    except (queue.Empty, OSError):
        return None
    return talk


def _join(join: Join, target: Target, end: float, key: bytes) -> Talk | None:
    try:
        talk = meet(target.host, target.port, end, key)
    except (OSError, GarbageError):
        return None
    try:
        talk.say(join, end)
    except OSError:
        talk.close()
        return None
    return talk


def _obey(facts: Facts, key: bytes, talk: Talk, leader: Target, end: float) -> End | Report:
    while True:
        order = talk.hear(Order, end)
        now = time.monotonic()
        if isinstance(order, End):
            return order
        if isinstance(order, Refused):
            return _alone(facts, key, leader, OK, refused=order.why)
        if isinstance(order, Welcome):
            end = now + order.seconds + GRACE_SECONDS
        elif isinstance(order, Knock):
            talk.say(Knocks(knock_all(facts.task, order.targets, order.seconds, key)), end)
        elif isinstance(order, Measure):
            found = measure(facts.task, order.target, order.seconds, key)
            talk.say(Measured(found), end)


def _alone(
    facts: Facts, key: bytes, leader: Target, why: str, *, came: bool = False, refused: str = ""
) -> Report:
    """What this task can say without the leader: itself, and who of the others answers it."""
    addresses = addresses_of(facts.cluster)
    others = {
        name: Target(name, *split_address(address))
        for name, address in addresses.items()
        if address and name not in {facts.task, leader.task}
    }
    knocks = knock_all(facts.task, list(others.values()), KNOCK_SECONDS, key) if not refused else []
    if not refused:
        address = f"{leader.host}:{leader.port}"
        knocks.append(Knocked(facts.task, leader.task, address, why))
    return Report(
        expected=[facts.task, *([] if refused else [leader.task])],
        addresses=addresses,
        leader=facts.task,
        facts={facts.task: facts},
        knocks=knocks,
        silent=[leader.task] if came else [],
        refused=[refused] if refused else [],
    )
