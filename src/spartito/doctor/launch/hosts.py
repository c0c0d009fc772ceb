"""The doctor of a job on several machines: a task of it on each, started over ssh as the job's."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from spartito.cluster.secret import with_secret
from spartito.doctor.examination import TIMEOUT, checked, examine, finish
from spartito.doctor.findings import Report
from spartito.errors import EXIT_TASK_LOST, SpartitoError, show
from spartito.launch.hosts.job import Reach, plan_on_hosts
from spartito.launch.supervisor import Patience, supervise

MARK = "spartito-doctor "
"""Where the report begins on the first task's stdout."""


def examine_hosts(
    reach: Reach,
    seconds: float = TIMEOUT,
    *,
    workers: int | None = None,
    ps: int = 0,
    as_json: bool = False,
    env: Mapping[str, str] | None = None,
) -> int:
    """Examine the tasks that `launch_on_hosts` would start, at the same places and ports.

    Prints the first task's report (see `examine`) and answers its exit code; leaves nothing
    behind. Raises `UserError` where a machine cannot take part.
    """
    limit = checked(seconds)
    variables = dict(os.environ if env is None else env)
    plan = plan_on_hosts(
        [__name__, f"{limit}"], reach, variables, module=True, workers=workers, ps=ps
    )
    told = with_secret(variables)
    processes = [replace(plan.process(t, told), restarts=0, vital=True) for t in plan.roles.tasks]
    quick = Patience(stop=1.0, interrupt=1.0, cause=0.1)
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        code = supervise(processes, patience=quick, out=printed, err=errors)
        printed.seek(0)
        report = _report(printed.read().decode(errors="replace"))
        if report is None:
            errors.seek(0)
            sys.stderr.write(errors.read().decode(errors="replace"))
            return code or EXIT_TASK_LOST
    return finish(report, as_json, None)


def _report(printed: str) -> Report | None:
    """The report in what the tasks printed; None where there is none."""
    found = (line.partition(MARK)[2] for line in printed.splitlines() if MARK in line)
    return next((msgspec.json.decode(text, type=Report) for text in found), None)


def _main(seconds: float) -> int:
    """Examine as one of the tasks; the first prints the report for the one that started us."""
    with tempfile.TemporaryDirectory(prefix="spartito-") as folder:
        into = Path(folder) / "report.json"
        try:
            code = examine(seconds, into=into)
        except SpartitoError as error:
            return show(error)
        if into.exists():
            print(MARK + into.read_text(), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(_main(float(sys.argv[1])))
