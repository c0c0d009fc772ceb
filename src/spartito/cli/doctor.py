"""The command ``spartito doctor``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from spartito.cli.options import job_of, real, switch, taken_from, typed, value, with_options
from spartito.errors import UserError
from spartito.launch.hosts.job import Hosts
from spartito.launch.job import JobSpec, Program
from spartito.notes import say

NOT_EXAMINED = (
    "evaluator", "chief", "name", "out", "data", "env", "log_dir", "yes",
    "recover", "min_workers", "wait", "restarts",
)  # fmt: skip


@with_options(
    JobSpec, Hosts, first=("workers", "hosts", "compose", "timeout", "json"), without=NOT_EXAMINED
)
def doctor(
    compose: Annotated[
        Path | None, value("Examine the tasks of this compose file, in containers.", "FILE")
    ] = None,
    timeout: Annotated[
        float,
        value(
            "Seconds after which it ends, even if tasks are missing.",
            "SECONDS",
            parser=real("--timeout", above=True),
        ),
    ] = 10.0,
    json: Annotated[
        bool, switch("--json", "Print the report as one line of JSON instead.")
    ] = False,
    **given: Any,
) -> None:
    """Say whether the tasks of a cluster reach each other.

    Run it on every one of them. With --workers it examines so many processes started here, not
    the cluster we are in.

    Example: spartito doctor --hosts a,b
    """
    insecure = given["insecure"] or None
    others = {"--workers": given["workers"], "--hosts": given["hosts"], "--insecure": insecure}
    wrong = [name for name, value in others.items() if value is not None]
    if compose is not None and wrong:
        raise UserError(f"{' '.join(wrong)} and --compose exclude each other", "Give one of them.")
    job = job_of(Program("doctor"), given)
    if given["hosts"] is not None:
        from spartito.doctor.launch.processes import examine_hosts

        hosts = Hosts(**taken_from(Hosts, given))
        raise typer.Exit(examine_hosts(hosts, job, timeout, as_json=json))
    if wrong := [*(["--ps"] if job.ps else []), *typed(Hosts, given)]:
        raise UserError(f"{' '.join(wrong)} without --hosts", "Name the machines: --hosts a,b,c")
    if compose is not None:
        from spartito.doctor.launch.containers import examine_containers

        raise typer.Exit(examine_containers(compose, timeout, as_json=json))
    if job.insecure:
        say("insecure: tasks do not encrypt (--insecure)")
    from spartito.doctor.examination import examine
    from spartito.doctor.launch.processes import examine_here

    env = job.environment(os.environ)
    if job.workers is None:
        raise typer.Exit(examine(timeout, as_json=json, env=env))
    raise typer.Exit(examine_here(job.workers, timeout, as_json=json, env=env))
