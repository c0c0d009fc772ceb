"""The command ``spartito compare``: one job under several strategies, on one page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from spartito.cli.options import (
    Arguments,
    RecipeData,
    Target,
    taken_from,
    value,
    with_options,
)
from spartito.comparison.plan import ALL, ENV_THREADS, Asked, containers_for, make_plan
from spartito.launch.containers.launcher import Compose
from spartito.launch.job import Heading


@with_options(
    *(Asked, Compose),
    first=("strategies", "workers", "ps", "epochs", "goal", "repeat", "out"),
    without=("gpus", "hosts", "into", "timeout"),
)
def compare(
    target: Target,
    arguments: Arguments = None,
    strategies: Annotated[
        list[str] | None,
        value(
            "Which to compare: all, or some with commas, or one at a time; options in "
            "parentheses, as 'mirrored, local_sgd(every=50)'.",
            "STRATEGIES",
        ),
    ] = None,
    data: RecipeData = None,
    out: Annotated[Path | None, value("The folder to write.", "DIR")] = None,
    on: Annotated[
        str,
        value(
            "Where the tasks run: processes, or compose for containers.", "WHERE", Heading.WORKERS
        ),
    ] = "processes",
    **given: Any,
) -> None:
    """Train under several strategies, side by side.

    A table, sentences and a page with charts say what each took and reached.

    Example: spartito compare mnist --workers 2 --ps 1 --epochs 5 --goal val_accuracy=0.95
    """
    from spartito.comparison.run import compare_strategies
    from spartito.system.capacity import available_cores

    asked = Asked(
        target,
        arguments or [],
        strategies=", ".join(strategies or [ALL]),
        data=data,
        out=out,
        containers=containers_for(on, Compose(**taken_from(Compose, given))),
        cores=None if ENV_THREADS in os.environ else available_cores(),
        **taken_from(Asked, given),
    )
    raise typer.Exit(compare_strategies(make_plan(asked)))
