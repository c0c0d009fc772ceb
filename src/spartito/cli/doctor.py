"""The command ``spartito doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spartito.cli.options import whole
from spartito.errors import UserError


def doctor(
    workers: Annotated[
        int | None,
        typer.Option(
            help="Examine so many processes started here, not the cluster we are in.",
            parser=whole("--workers"),
            metavar="N",
        ),
    ] = None,
    compose: Annotated[
        Path | None,
        typer.Option(help="Examine the tasks of this compose file, in containers.", metavar="FILE"),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds until it ends, whoever is there.", metavar="SECONDS")
    ] = 10.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print the report as one line of JSON instead.")
    ] = False,
) -> None:
    """Say whether the tasks of a cluster reach each other; run it on every one of them.

    Example: spartito doctor --workers 2
    """
    if workers is not None and compose is not None:
        raise UserError("--workers and --compose exclude each other", "Give one of them.")
    if compose is not None:
        from spartito.launch.doctor.containers import examine_containers

        raise typer.Exit(examine_containers(compose, timeout, as_json=json))
    from spartito.launch.doctor.examination import examine, examine_here

    if workers is None:
        raise typer.Exit(examine(timeout, as_json=json))
    raise typer.Exit(examine_here(workers, timeout, as_json=json))
