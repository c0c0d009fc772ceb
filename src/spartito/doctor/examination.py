"""The whole examination, as one of the tasks of the cluster that the environment describes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf

import msgspec

from spartito.cluster import ClusterSpec, resolve
from spartito.cluster.endpoints import open_hosts, peer_endpoint, port_range, training_endpoints
from spartito.doctor.facts import network
from spartito.doctor.facts.machine import collect
from spartito.doctor.findings import Findings, Port, Target, addresses_of
from spartito.doctor.probe.coordinator import Coordinator
from spartito.doctor.probe.participant import follow
from spartito.doctor.report import closing, show
from spartito.doctor.rules.judge import judge
from spartito.doctor.transport.messages import End
from spartito.doctor.transport.server import DoctorServer, open_server
from spartito.errors import UserError
from spartito.wire.addresses import DRAWN, Endpoint, split_address
from spartito.wire.listening import EVERYWHERE
from spartito.wire.secret import key_among

TIMEOUT = 10.0
"""Seconds that an examination may take."""

FACTS = 0.25
"""The fraction of the time limit that names and GPUs may take to be looked up."""

OTHER_PORTS = 3
"""So many ports after the coordinator's are tried when another program has its own."""


def examine(
    seconds: float = TIMEOUT, *, as_json: bool = False, env: Mapping[str, str] | None = None
) -> int:
    """Examine a cluster together with its other tasks.

    The first task prints the report, the others one line. Ends within ``seconds``, once the first
    task is there within its ``seconds``.

    Args:
        seconds: the time limit.
        as_json: print one line of JSON instead of tables.
        env: the environment that describes the cluster; by default that of the process.

    Returns:
        The exit code: 0: all is well. 1: something is wrong. 69: a task did not come, or stopped
        responding.

    Raises:
        UserError: the cluster cannot be.
    """
    began = time.monotonic()
    variables = os.environ if env is None else env
    limit = checked(seconds)
    spec = resolve(variables)
    addresses = addresses_of(spec.addresses)
    first, own = str(spec.replica_tasks[0]), str(spec.task)
    if len(addresses) == 1:
        facts = collect(spec, variables, FACTS * limit)
        found = Findings([own], addresses, own, {own: facts}, waited=limit, seconds=_since(began))
        return show(found, as_json)
    candidates = _candidates(spec, first, variables)
    facts = collect(spec, variables, FACTS * limit)
    until = time.monotonic() + FACTS * limit
    with ExitStack() as stack:
        servers = _open(spec, candidates, variables, facts.process_group, until)
        for each in servers:
            stack.callback(each.server.close)
        meeting, last = servers[0], servers[-1]
        facts = msgspec.structs.replace(facts, port=meeting.port)
        if own == first:
            reached_at = Target(own, last.host or candidates[0].host, last.server.port)
            return _coordinate(
                Coordinator(facts, meeting.server, reached_at, limit, began), as_json
            )
        ended = follow(facts, last.server, last.host, candidates, began + limit)
    if isinstance(ended, End):
        print(f"{own}: {ended.summary}", file=sys.stderr if as_json else sys.stdout, flush=True)
        return ended.code
    passed = _since(began)
    return show(msgspec.structs.replace(ended, waited=limit, seconds=passed), as_json)


def _coordinate(coordinator: Coordinator, as_json: bool) -> int:
    own = coordinator.facts.task
    code, summary = 1, f"{own} could not finish the report"
    try:
        found = coordinator.examine()
        code = show(found, as_json)
        summary = f"{closing(found, judge(found))}; {own} prints the whole report"
        return code
    finally:
        coordinator.dismiss(code, summary)


def _candidates(spec: ClusterSpec, first: str, env: Mapping[str, str]) -> list[Target]:
    """Where the doctor of the task ``first`` may listen: at its port, or just after it."""
    addresses = addresses_of(spec.addresses)
    address = addresses[first] or spec.rendezvous
    if not address:
        raise UserError(
            f"{spec.source} gives {first} no address, so that its tasks cannot meet",
            f"Give {first} an address, as host:29500.",
        )
    host, port = split_address(address)
    taken = {split_address(other)[1] for other in addresses.values() if other} | {port}
    others = port_range(env) or range(port + 1, min(port + 100, 65536))
    after = [each for each in others if each not in taken][:OTHER_PORTS]
    return [Target(first, host, each) for each in (port, *after)]


@dataclass(frozen=True, slots=True)
class Opened:
    """A server at one of the endpoints that training opens; the others know it as ``host``."""

    server: DoctorServer
    host: str
    port: Port | None


def _open(
    spec: ClusterSpec,
    candidates: list[Target],
    env: Mapping[str, str],
    process_group: bool,
    end: float,
) -> list[Opened]:
    """Listen where training would; a task that would nowhere, where its replica might.

    The name service is waited for until ``end``.
    """
    meeting = network.resolve_names([candidates[0].host], end)[0]
    coordinates = str(spec.task) == candidates[0].task
    if not meeting.addresses and not coordinates and not spec.address_of(spec.task):
        endpoints = [Endpoint(str(spec.task), EVERYWHERE, (DRAWN,), others=False)]
    else:
        endpoints = training_endpoints(spec, env, group=process_group)
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    found, key = [], key_among(open_hosts(spec), env)
    for endpoint in endpoints or [peer_endpoint(spec, env)]:
        at_meeting = coordinates and endpoint.is_fixed
        spare = [candidate.port for candidate in candidates[1:]] if at_meeting else []
        server, port = open_server(endpoint, end, spare, agent=agent and at_meeting, key=key)
        host = "" if endpoint.host == EVERYWHERE else endpoint.host
        found.append(Opened(server, host, None if endpoint.ports == (DRAWN,) else port))
    return found


def checked(seconds: float) -> float:
    """``seconds`` if they can be a time limit; else `UserError`."""
    if not 0 < seconds < inf:
        raise UserError(f"--timeout {seconds:g} is not a number of seconds above 0")
    return seconds


def _since(began: float) -> float:
    return time.monotonic() - began
