"""Any other task: it joins the coordinator, and carries out its orders."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

from spartito.doctor.findings import Facts, Findings, Outcome, Probe, Target, addresses_of
from spartito.doctor.probe.probes import carry_out, probe, probe_all
from spartito.doctor.transport.connection import Connection, PeerError, connect
from spartito.doctor.transport.messages import End, FromCoordinator, Join, Refused, Welcome
from spartito.doctor.transport.server import DoctorServer
from spartito.wire.addresses import split_address
from spartito.wire.secret import Key

RETRY_SECONDS = 0.05
"""Between two attempts to reach a coordinator that does not listen yet."""

PROBE_SECONDS = 1.0
SECRET_SECONDS = 3.0
"""How long the coordinator's address may be that of a task with another secret: a running job
may have the port, and the doctor comes to the next one."""

GRACE_SECONDS = 1.0
"""How long after the coordinator's time limit its last message may come."""


def follow(
    facts: Facts, server: DoctorServer, host: str, candidates: Sequence[Target], end: float
) -> End | Findings:
    """Join the coordinator, who listens at one of ``candidates``, and obey until its `End`.

    Where only it can come to us, as to a parameter server, we follow its invitation. Others reach
    our ``server`` at ``host``, "" for the address that the coordinator sees.

    The `Findings` are what we can tell alone, when the coordinator does not come until ``end``,
    does not let us in, has another secret, or stops responding.
    """
    key, join = server.key, Join(facts, server.port, host)
    give_up = max(end - PROBE_SECONDS - RETRY_SECONDS, (time.monotonic() + end) / 2)
    other_secret, wait_until = None, give_up
    while True:
        connection, first = _joined(join, server, candidates, end)
        if connection is not None:
            break
        now = time.monotonic()
        if first.outcome is Outcome.OTHER_SECRET and other_secret is None:
            other_secret, wait_until = first, min(give_up, now + SECRET_SECONDS)
        if other_secret is not None and now >= wait_until:
            return _alone(facts, key, other_secret)
        if now >= give_up:
            findings = _alone(facts, key, first)
            # The others look who is there at about the same time: be there.
            time.sleep(max(0.0, end - time.monotonic()))
            return findings
        time.sleep(RETRY_SECONDS)
    with connection:
        try:
            ended = _obey(facts.task, key, connection, end)
        except PeerError:
            silent = Probe(facts.task, *_named(candidates[0]), Outcome.SILENT)
            return _alone(facts, key, silent, came=True)
    if isinstance(ended, Refused):
        return Findings(
            [facts.task],
            addresses_of(facts.cluster),
            facts.task,
            {facts.task: facts},
            refused=[ended.why],
        )
    return ended


def _joined(
    join: Join, server: DoctorServer, candidates: Sequence[Target], end: float
) -> tuple[Connection | None, Probe]:
    """The connection to the coordinator, and what is at the first of its candidates."""
    probes = []
    for target in candidates:
        if (connection := _invited(join, server, end)) is not None:
            return connection, Probe(join.facts.task, *_named(target), Outcome.OK)
        limit = min(time.monotonic() + PROBE_SECONDS, end)
        probes.append(probe(join.facts.task, target, limit, server.key))
        if probes[-1].ok:
            return _join(join, target, end, server.key), probes[0]
    return None, probes[0]


def _join(join: Join, target: Target, end: float, key: Key) -> Connection | None:
    try:
        connection = connect(target, end, key)
    except PeerError:
        return None
    try:
        connection.send(join, end)
    except PeerError:
        connection.close()
        return None
    return connection


def _invited(join: Join, server: DoctorServer, end: float) -> Connection | None:
    """The connection on which the coordinator has asked us to come in, and we have."""
    try:
        connection = server.invitations.get_nowait()
        connection.send(join, end)
    except (queue.Empty, PeerError):
        return None
    return connection


def _obey(task: str, key: Key, connection: Connection, end: float) -> End | Refused:
    while True:
        message = connection.receive(FromCoordinator, end)
        if isinstance(message, End | Refused):
            return message
        if isinstance(message, Welcome):
            end = time.monotonic() + message.seconds + GRACE_SECONDS
        else:
            connection.send(carry_out(message, task, key), end)


def _alone(facts: Facts, key: Key, coordinator: Probe, *, came: bool = False) -> Findings:
    """What this task can say without the coordinator: itself, and which others respond."""
    addresses = addresses_of(facts.cluster)
    others = [
        Target(name, *split_address(address))
        for name, address in addresses.items()
        if address and name not in {facts.task, coordinator.target}
    ]
    return Findings(
        expected=[facts.task, coordinator.target],
        addresses=addresses,
        coordinator=facts.task,
        facts={facts.task: facts},
        probes=[*probe_all(facts.task, others, PROBE_SECONDS, key), coordinator],
        unresponsive=[coordinator.target] if came else [],
    )


def _named(target: Target) -> tuple[str, str]:
    return target.task, target.address
