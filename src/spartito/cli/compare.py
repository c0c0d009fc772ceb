"""The command ``spartito compare``: one job under several strategies, on one page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from spartito.cli.options import Arguments, Target, taken_from, whole, with_options
from spartito.launch.containers.launcher import Compose
from spartito.launch.job import Heading


@with_options(
    Compose,
    first=("strategies", "workers", "ps", "epochs", "goal", "repeat", "out"),
    without=("gpus", "hosts", "into", "timeout"),
)
def compare(
    target: Target,
    arguments: Arguments = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            help="Which to compare: all, or some with commas, or one at a time; options in "
            "parentheses, as 'mirrored, local_sgd(every=50)'.",
            metavar="STRATEGIES",
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            help="Processes or containers that compute.", parser=whole("--workers", 1), metavar="N"
        ),
    ] = 2,
    ps: Annotated[
        int | None,
        typer.Option(
            "--ps",
            help="Parameter servers, for the strategy that has them; 1 by default.",
            parser=whole("--ps", 1),
            metavar="N",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the data.", parser=whole("--epochs", 1), metavar="N"),
    ] = None,
    goal: Annotated[
        str | None, typer.Option(help="What to reach, as val_accuracy=0.95.", metavar="NAME=VALUE")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="More runs: workers=1,2,4, or for recipes batch_size=32,512,8192.",
            metavar="NAME=VALUES",
            rich_help_panel=Heading.ADVANCED,
        ),
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            help="Let a process run a fraction of the time only, as worker:1=0.25.",
            metavar="TASK=FRACTION",
            rich_help_panel=Heading.ADVANCED,
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Put each task on a machine of its own (a network namespace: needs root), at a "
            "line of this rate and delay, as 100mbit or 10mbit,50ms.",
            metavar="RATE[,DELAY]",
            rich_help_panel=Heading.ADVANCED,
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(
            help="Runs of each, in turn; the table has medians and spreads.",
            parser=whole("--repeat", 1),
            metavar="N",
        ),
    ] = 1,
    data: Annotated[
        str | None,
        typer.Option(
            help="The folder with a recipe's data, or its URL.",
            metavar="DIR",
            rich_help_panel=Heading.TRAINING,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="A recipe's examples per step, over all workers.",
            parser=whole("--batch-size", 1),
            metavar="N",
            rich_help_panel=Heading.TRAINING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Where a recipe's randomness begins.",
            parser=whole("--seed"),
            metavar="N",
            rich_help_panel=Heading.TRAINING,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write.", metavar="DIR")] = None,
    on: Annotated[
        str,
        typer.Option(
            help="Where the tasks run: processes, or compose for containers.",
            metavar="WHERE",
            rich_help_panel=Heading.WORKERS,
        ),
    ] = "processes",
    **given: Any,
) -> None:
    """Train under several strategies, side by side.

    A table, sentences and a page with charts say what each took and reached.

    Example: spartito compare mnist --workers 2 --ps 1 --epochs 5 --goal val_accuracy=0.95
    """
    from spartito.comparison.plan import ALL, ENV_THREADS, containers_for, make_plan
    from spartito.comparison.run import compare_strategies
    from spartito.system.capacity import available_cores

    plan = make_plan(
        target,
        arguments or [],
        strategies=", ".join(strategies or [ALL]),
        workers=workers,
        ps=ps,
        epochs=epochs,
        goal=goal,
        sweeps=sweep or [],
        slow=slow or [],
        link=link,
        repeat=repeat,
        data=data,
        batch_size=batch_size,
        seed=seed,
        out=out,
        containers=containers_for(on, Compose(**taken_from(Compose, given))),
        cores=None if ENV_THREADS in os.environ else available_cores(),
    )
    raise typer.Exit(compare_strategies(plan))
