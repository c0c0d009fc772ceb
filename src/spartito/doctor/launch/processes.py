"""The doctor of tasks that are started here: on this machine, or over ssh on others."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

import msgspec

from spartito.cluster.endpoints import port_range
from spartito.doctor.examination import TIMEOUT, checked
from spartito.doctor.findings import Findings
from spartito.doctor.report import show
from spartito.errors import EXIT_TASK_LOST, UserError
from spartito.launch.hosts.job import Hosts
from spartito.launch.job import JobSpec, Program
from spartito.launch.processes.local import Position, environments
from spartito.launch.processes.process import Patience, Process
from spartito.launch.processes.supervisor import supervise
from spartito.names import ENV_SNAPSHOT_DIR
from spartito.wire.ports import free_port
from spartito.wire.secret import with_secret

LAUNCHED = ("TF_CONFIG", ENV_SNAPSHOT_DIR)
"""Variables that are not the launcher's own workers' business."""


def examine_here(
    workers: int,
    seconds: float = TIMEOUT,
    *,
    as_json: bool = False,
    env: Mapping[str, str] | None = None,
) -> int:
    """Examine ``workers`` tasks, started on this machine as `spartito run` would start them.

    As `spartito.doctor.examination.examine` otherwise.
    """
    variables = os.environ if env is None else env
    command = [sys.executable, *_doctor(seconds)]
    if workers < 1:
        raise UserError(f"--workers {workers} is less than 1")
    base = with_secret({n: value for n, value in variables.items() if n not in LAUNCHED})
    with ExitStack() as held:
        port = free_port(allowed=port_range(variables), held=held)
        processes = [
            Process(f"worker {index}", command, own)
            for index, own in enumerate(
                environments(base, Position(0, 1, "127.0.0.1", port), workers)
            )
        ]
        return _examine(processes, as_json)


def examine_hosts(
    hosts: Hosts, job: JobSpec, seconds: float = TIMEOUT, *, as_json: bool = False
) -> int:
    """Examine the tasks that `Hosts` would start for ``job``, on the same machines and ports.

    Leaves nothing behind. Raises `UserError` where a machine cannot take part; as
    `spartito.doctor.examination.examine` otherwise.
    """
    _, module, *arguments = _doctor(seconds)
    plan = hosts.plan(replace(job, program=Program(module, tuple(arguments), "module")))
    env = with_secret(hosts.variables(job))
    processes = [replace(plan.process(t, env), restarts=0, vital=True) for t in plan.roles.tasks]
    return _examine(processes, as_json)


def _doctor(seconds: float) -> list[str]:
    return ["-m", "spartito", "doctor", "--no-config", "--json", f"--timeout={checked(seconds)}"]


def _examine(processes: Sequence[Process], as_json: bool) -> int:
    """Run doctors; show what the first one finds, or why none did."""
    quick = Patience(stop=1.0, interrupt=1.0, cause=0.1)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = supervise(processes, patience=quick, out=out, err=err)
        for stream in (out, err):
            stream.seek(0)
        found = _findings(out.read())
        if found is None:
            sys.stderr.write(err.read().decode(errors="replace"))
            return code or EXIT_TASK_LOST
    return show(found, as_json)


def _findings(printed: bytes) -> Findings | None:
    """The first task's findings, in what all tasks printed; None where there are none."""
    for line in printed.splitlines():
        with suppress(msgspec.DecodeError):  # what another program prints
            found = msgspec.json.decode(line[line.find(b"{") :], type=Findings)
            if found.coordinator == next(iter(found.addresses)):
                return found
    return None
