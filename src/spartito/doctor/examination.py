"""The whole examination: of the cluster that the environment describes, or of workers here."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from spartito.cluster import ClusterSpec, resolve
from spartito.cluster.endpoints import (
    DRAWN,
    Endpoint,
    check_drawn,
    peer_endpoint,
    port_range,
    training_endpoints,
)
from spartito.cluster.ports import free_port
from spartito.cluster.secret import read_secret, with_secret
from spartito.cluster.spec import split_address
from spartito.doctor import report as tables
from spartito.doctor.facts import machine as local_facts
from spartito.doctor.facts import network
from spartito.doctor.findings import Report, addresses_of
from spartito.doctor.probe.coordinator import Leader
from spartito.doctor.probe.participant import follow
from spartito.doctor.rules.judge import judge
from spartito.doctor.rules.verdict import Verdict, exit_code
from spartito.doctor.transport.messages import End, Facts, Port, Target
from spartito.doctor.transport.server import ANYWHERE, Station, open_station
from spartito.errors import EXIT_TASK_LOST, SpartitoError, UserError, show
from spartito.launch.local import Place, environments
from spartito.launch.process import Process
from spartito.launch.supervisor import Patience, supervise
from spartito.names import ENV_SNAPSHOT_DIR

TIMEOUT = 10.0
"""Seconds that an examination may take."""

FACTS = 0.25
"""The share of the time limit that names and GPUs may take to be looked up."""

OTHER_PORTS = 3
"""So many ports after the leader's are tried when another program has its own."""

LAUNCHED = ("TF_CONFIG", ENV_SNAPSHOT_DIR)
"""Variables that are not the launcher's own workers' business."""


def examine(
    seconds: float = TIMEOUT,
    *,
    as_json: bool = False,
    into: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Examine the cluster of ``env`` together with its other tasks; answers the exit code.

    The first task prints the report (with ``as_json`` one line of JSON; ``into``: the report
    goes to that file instead), the others one line. 0: all is well. 1: something is wrong.
    69: a task did not come, or fell silent. Ends within ``seconds``, once the first task is
    there within its ``seconds``. Raises `UserError` for a cluster that cannot be.
    """
    began = time.monotonic()
    variables = os.environ if env is None else env
    limit = checked(seconds)
    spec = resolve(variables)
    addresses = addresses_of(spec.addresses)
    lead = str(spec.replica_tasks[0])
    name = str(spec.task)
    if len(addresses) == 1:
        facts = _facts(spec, variables, limit)
        report = Report([name], addresses, name, {name: facts}, limit=limit)
        return finish(msgspec.structs.replace(report, seconds=_since(began)), as_json, into)
    candidates = _candidates(spec, lead, variables)
    facts = _facts(spec, variables, limit)
    until = time.monotonic() + FACTS * limit
    stations = _open(spec, candidates, variables, facts.group, until)
    try:
        first, last = stations[0], stations[-1]
        facts = msgspec.structs.replace(facts, port=first.port, refusal=_refusal(facts, variables))
        if name == lead:
            own = Target(name, last.host or candidates[0].host, last.station.port)
            return _lead(Leader(facts, first.station, own, limit, began), as_json, into)
        ended = follow(facts, last.station, last.host, candidates, began + limit)
    finally:
        for each in stations:
            each.station.close()
    if isinstance(ended, End):
        print(f"{name}: {ended.words}", file=sys.stderr if as_json else sys.stdout, flush=True)
        return ended.code
    ended = msgspec.structs.replace(ended, limit=limit, seconds=_since(began))
    return finish(ended, as_json, None)


def examine_here(
    workers: int,
    seconds: float = TIMEOUT,
    *,
    as_json: bool = False,
    env: Mapping[str, str] | None = None,
) -> int:
    """Examine ``workers`` tasks started on this machine as `spartito run` would start them."""
    variables = os.environ if env is None else env
    limit = checked(seconds)
    if workers < 1:
        raise UserError(f"--workers {workers} is less than 1")
    base = with_secret({n: value for n, value in variables.items() if n not in LAUNCHED})
    place = Place(0, 1, "127.0.0.1", free_port(allowed=port_range(variables)))
    with tempfile.TemporaryDirectory(prefix="spartito-") as folder:
        result, errors = Path(folder) / "report.json", Path(folder) / "errors"
        command = [sys.executable, "-m", __name__, f"--seconds={limit}", f"--into={result}"]
        processes = [
            Process(f"worker {index}", command, own)
            for index, own in enumerate(environments(base, place, workers))
        ]
        with errors.open("wb") as kept, open(os.devnull, "wb") as nothing:
            quick = Patience(stop=1.0, interrupt=1.0, cause=0.1)
            code = supervise(processes, patience=quick, out=nothing, err=kept)
        if not result.exists():
            sys.stderr.write(errors.read_text(errors="replace"))
            return code or EXIT_TASK_LOST
        report = msgspec.json.decode(result.read_bytes(), type=Report)
    return finish(report, as_json, None)


def as_object(report: Report, verdicts: list[Verdict]) -> dict[str, Any]:
    """The whole report and its verdicts, for JSON."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    return {
        **found,
        "absent": report.absent,
        "slow": sorted(list(way) for way in report.slow),
        "verdicts": msgspec.to_builtins(verdicts),
        "exit_code": exit_code(verdicts),
    }


def _lead(leader: Leader, as_json: bool, into: Path | None) -> int:
    name = leader.facts.task
    code, words = 1, f"{name} could not finish the report"
    try:
        report = leader.examine()
        code = finish(report, as_json, into)
        words = f"{tables.closing(report, judge(report))}; {name} shows the whole"
        if into is not None and code != EXIT_TASK_LOST:
            code = 0  # who reads the file decides; only a lost task must end the others at once
        return code
    finally:
        leader.dismiss(code, words)


def finish(report: Report, as_json: bool, into: Path | None) -> int:
    """Show ``report``; answers the exit code."""
    verdicts = judge(report)
    if into is not None:
        part = into.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(report))
        part.replace(into)
    elif as_json:
        print(msgspec.json.encode(as_object(report, verdicts)).decode(), flush=True)
    else:
        tables.show(report, verdicts)
        sys.stdout.flush()
    return exit_code(verdicts)


def _facts(
    spec: ClusterSpec,
    env: Mapping[str, str],
    limit: float,
) -> Facts:
    seconds = FACTS * limit
    addresses = [a for tasks in spec.addresses.values() for a in tasks if a]
    names = network.resolve_names(
        (split_address(address)[0] for address in addresses), time.monotonic() + seconds
    )
    facts = local_facts.collect(spec, env, seconds)
    return msgspec.structs.replace(facts, names=names, routes=network.routes(names))


def _candidates(spec: ClusterSpec, lead: str, env: Mapping[str, str]) -> list[Target]:
    """Where the doctor of the task ``lead`` may listen: at its port, or just after it."""
    addresses = addresses_of(spec.addresses)
    address = addresses[lead] or spec.rendezvous
    if not address:
        raise UserError(
            f"{spec.source} gives {lead} no address, so that its tasks cannot meet",
            f"Give {lead} an address, as host:29500.",
        )
    host, port = split_address(address)
    taken = {split_address(other)[1] for other in addresses.values() if other} | {port}
    others = port_range(env) or range(port + 1, min(port + 100, 65536))
    after = [each for each in others if each not in taken][:OTHER_PORTS]
    return [Target(lead, host, each) for each in (port, *after)]


@dataclass(frozen=True, slots=True)
class Open:
    """A station at one of the endpoints that training opens; the others are told ``host``."""

    station: Station
    host: str
    port: Port | None


def _open(
    spec: ClusterSpec, candidates: list[Target], env: Mapping[str, str], group: bool, end: float
) -> list[Open]:
    """Listen where training would; a task that would nowhere, where its replica might.

    The name service is waited for until ``end``.
    """
    meeting = network.resolve_names([candidates[0].host], end)[0]
    leads = str(spec.task) == candidates[0].task
    if not meeting.addresses and not leads and not spec.address_of(spec.task):
        endpoints = [Endpoint(str(spec.task), ANYWHERE, (DRAWN,), others=False)]
    else:
        endpoints = training_endpoints(spec, env, group=group)
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    found, key = [], read_secret(env).encode()
    for endpoint in endpoints or [peer_endpoint(spec, env)]:
        at_meeting = leads and endpoint.is_fixed
        spare = [candidate.port for candidate in candidates[1:]] if at_meeting else []
        at = agent and at_meeting
        station, port = open_station(endpoint, end, spare, agent=at, key=key)
        host = "" if endpoint.host == ANYWHERE else endpoint.host
        found.append(Open(station, host, None if endpoint.ports == (DRAWN,) else port))
    return found


def _refusal(facts: Facts, env: Mapping[str, str]) -> str:
    """Why training would not begin to listen."""
    try:
        if facts.group:
            check_drawn(env)
    except UserError as error:
        return str(error)
    return ""


def checked(seconds: float) -> float:
    """``seconds`` if they can be a time limit; else `UserError`."""
    if not 0 < seconds < inf:
        raise UserError(f"--timeout {seconds:g} is not a number of seconds above 0")
    return seconds


def _since(began: float) -> float:
    return time.monotonic() - began


def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=TIMEOUT)
    parser.add_argument("--into", type=Path)
    given = parser.parse_args()
    try:
        return examine(given.seconds, into=given.into)
    except SpartitoError as error:
        return show(error)


if __name__ == "__main__":
    sys.exit(_main())
