"""Start a job on several machines from one shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spartito.cluster.endpoints import port_range
from spartito.cluster.resolver import check_alone
from spartito.cluster.secret import with_secret
from spartito.errors import UserError
from spartito.launch.hosts.check import ask_hosts, find_hosts, notes
from spartito.launch.hosts.facts import Facts, Question
from spartito.launch.hosts.names import Host
from spartito.launch.hosts.plan import OF_A_PLACE, PORT, Plan, check_passed
from spartito.launch.hosts.ssh import Ssh, parse_ssh
from spartito.launch.local import Place, check_number, check_strategy, snapshots
from spartito.launch.process import with_logs
from spartito.launch.roles import Roles
from spartito.launch.supervisor import supervise
from spartito.names import ENV_PORTS, ENV_SNAPSHOT_DIR, ENV_STRATEGY, ENV_STRATEGY_OPTIONS


@dataclass(frozen=True, slots=True)
class Reach:
    """Which machines take part, as typed, and how the others are reached.

    ``ssh`` is the command, ``port`` the first where tasks listen if no range is allowed. ``folder``
    and ``python`` are those of the other machines: by default the same as here. ``passed`` are
    names of variables that the tasks there get as well.
    """

    hosts: str
    ssh: str | None = None
    port: int | None = None
    folder: str | None = None
    python: str | None = None
    passed: tuple[str, ...] = ()


def launch_on_hosts(
    argv: Sequence[str],
    reach: Reach,
    *,
    module: bool = False,
    workers: int | None = None,
    ps: int = 0,
    evaluator: bool = False,
    chief: bool = False,
    strategy: str | None = None,
    strategy_options: str | None = None,
    result: bool = False,
    log_dir: Path | None = None,
    yes: bool = False,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run ``argv`` on the machines of ``reach``, ``workers`` processes on each; see `launch`.

    Every task is a process of its own to the supervisor, a remote one behind ssh. Answers the
    job's exit code; raises `UserError` before anything starts, after all machines were asked.
    """
    variables = dict(os.environ if env is None else env)
    chosen = {ENV_STRATEGY: strategy, ENV_STRATEGY_OPTIONS: strategy_options}
    variables |= {name: value for name, value in chosen.items() if value is not None}
    plan = plan_on_hosts(
        argv,
        reach,
        variables,
        module=module,
        workers=workers,
        ps=ps,
        evaluator=evaluator,
        chief=chief,
        yes=yes,
    )
    variables = with_secret(variables)
    roles, hosts = plan.roles, plan.hosts
    with snapshots(roles, variables) as (folder, _):
        own = {} if folder is None else {ENV_SNAPSHOT_DIR: folder}  # other machines have theirs
        processes = [
            plan.process(task, variables | (own if hosts[plan.machine_of(task)].here else {}))
            for task in roles.tasks
        ]
        processes = with_logs(processes, log_dir)
        code = supervise(processes, result_of=0 if result else None, private=folder)
    if code == 0 and not hosts[0].here:
        _say(f"what {roles.tasks[0]} wrote is on {hosts[0].name}, in {plan.ssh.folder}")
    return code


def plan_on_hosts(
    argv: Sequence[str],
    reach: Reach,
    env: Mapping[str, str],
    *,
    module: bool = False,
    workers: int | None = None,
    ps: int = 0,
    evaluator: bool = False,
    chief: bool = False,
    yes: bool = True,
) -> Plan:
    """Ask the machines of ``reach``, and say which task of such a job would be where.

    Raises `UserError` where one of them cannot take part, or the job cannot be.
    """
    check_alone({name: value for name, value in env.items() if name not in OF_A_PLACE}, "--hosts")
    check_passed(reach.passed, env)
    ssh = Ssh(
        parse_ssh(reach.ssh or "ssh"), reach.folder or os.getcwd(), reach.python or sys.executable
    )
    hosts, allowed = find_hosts(reach.hosts, ssh), port_range(env)
    if reach.port and allowed:
        raise UserError(
            f"--port {reach.port} beside the range of ports {env[ENV_PORTS]}",
            "Leave --port out: the first task of a machine listens at the first of the range.",
        )
    port = reach.port or (allowed[0] if allowed else PORT)
    count = len(hosts)
    places = {0, *(index % count for index in range(ps))} if ps else range(count)
    names = tuple(sorted({hosts[place].address for place in places})) if count > 1 else ()
    found = ask_hosts(hosts, ssh, Question(argv[0], module, names))
    each = _workers(hosts, found, workers)
    roles = Roles(each * count, ps, evaluator, chief)
    for host, told in zip(hosts, found, strict=True):
        check_number(each, told.cores, yes, host.name)
    place = Place(0, count, hosts[0].address, port)
    roles.check(source=None)
    check_strategy(env.get(ENV_STRATEGY), env.get(ENV_STRATEGY_OPTIONS), place, each, ps)
    words = (*(("-m",) if module else ()), *argv)
    plan = Plan(hosts, tuple(f.cores for f in found), roles, words, ssh, port, reach.passed)
    plan.check_ports(allowed)
    for line in [*(f"note: {note}" for note in notes(hosts, found, each)), *plan.lines()]:
        _say(line)
    return plan


def _workers(hosts: Sequence[Host], found: Sequence[Facts], workers: int | None) -> int:
    """Workers of each machine: as asked, else one per GPU, or one."""
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers} is less than 1")
    if workers is not None:
        return workers
    counts = {max(1, told.gpus) for told in found}
    if len(counts) > 1:
        told_each = ", ".join(f"{h.name} {f.gpus}" for h, f in zip(hosts, found, strict=True))
        raise UserError(
            f"the machines have different numbers of GPUs: {told_each}",
            "Say how many processes each gets: --workers N.",
        )
    return counts.pop()


def _say(text: str) -> None:
    print(f"spartito: {text}", file=sys.stderr, flush=True)
