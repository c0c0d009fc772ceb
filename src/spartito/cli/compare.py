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
    number,
    taken_from,
    value,
    with_options,
)
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
        value(
            "Which to compare: all, or some with commas, or one at a time; options in "
            "parentheses, as 'mirrored, local_sgd(every=50)'.",
            "STRATEGIES",
        ),
    ] = None,
    workers: Annotated[int, number("--workers", "Processes or containers that compute.", 1)] = 2,
    ps: Annotated[
        int | None,
        number("--ps", "Parameter servers, for the strategy that has them; 1 by default.", 1),
    ] = None,
    epochs: Annotated[int | None, number("--epochs", "Passes over the data.", 1)] = None,
    goal: Annotated[str | None, value("What to reach, as val_accuracy=0.95.", "NAME=VALUE")] = None,
    sweep: Annotated[
        list[str] | None,
        value(
            "More runs: workers=1,2,4, or for recipes batch_size=32,512,8192.",
            "NAME=VALUES",
            Heading.ADVANCED,
        ),
    ] = None,
    slow: Annotated[
        list[str] | None,
        value(
            "Let a process run a fraction of the time only, as worker:1=0.25.",
            "TASK=FRACTION",
            Heading.ADVANCED,
        ),
    ] = None,
    link: Annotated[
        str | None,
        value(
            "Put each task on a machine of its own (a network namespace: needs root), at a "
            "line of this rate and delay, as 100mbit or 10mbit,50ms.",
            "RATE[,DELAY]",
            Heading.ADVANCED,
        ),
    ] = None,
    repeat: Annotated[
        int, number("--repeat", "Runs of each, in turn; the table has medians and spreads.", 1)
    ] = 1,
    data: RecipeData = None,
    batch_size: Annotated[
        int | None,
        number(
            "--batch-size", "A recipe's examples per step, over all workers.", 1, Heading.TRAINING
        ),
    ] = None,
    seed: Annotated[
        int | None,
        number("--seed", "Where a recipe's randomness begins.", heading=Heading.TRAINING),
    ] = None,
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
