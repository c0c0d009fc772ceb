"""The command ``spartito chaos``: what a job does when its tasks fail, one fault at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from spartito.chaos.schedule import KINDS, parse_schedules
from spartito.cli.options import (
    Arguments,
    RecipeData,
    Target,
    number,
    real,
    switch,
    value,
    whole,
    with_options,
    words_of,
)
from spartito.errors import UserError
from spartito.launch.job import Heading, JobSpec, Program
from spartito.launch.processes.local import Local
from spartito.system import check_linux

OWN = ("strategy", "workers", "ps", "chief", "evaluator", "out", "data", "name", "log_dir", "yes")
"""Options of a job that the suite sets itself."""

OF_ONE_MACHINE = ("nnodes", "node_rank", "master_addr")


@with_options(
    *(JobSpec, Local),
    first=("strategy", "workers", "ps", "faults", "roles", "rounds", "out"),
    without=(*OWN, *OF_ONE_MACHINE),
)
def chaos(
    target: Target,
    arguments: Arguments = None,
    strategy: Annotated[
        str, value("Under which: all, or some with commas, options in parentheses.", "STRATEGIES")
    ] = "mirrored",
    workers: Annotated[int, number("--workers", "Tasks that compute.", 1)] = 2,
    ps: Annotated[int, number("--ps", "Parameter servers, where a strategy has them.", 1)] = 2,
    chief: Annotated[
        bool, switch("--chief", "With servers: a chief that does not compute.", Heading.WORKERS)
    ] = False,
    evaluator: Annotated[
        bool, switch("--evaluator", "A task that evaluates each checkpoint.", Heading.WORKERS)
    ] = False,
    faults: Annotated[str, value(f"All, or some of {', '.join(KINDS)}.", "NAMES")] = "all",
    roles: Annotated[
        str,
        value(
            "Whom they happen to: all, or some of worker, chief, ps, evaluator, launcher.", "NAMES"
        ),
    ] = "all",
    schedule: Annotated[
        str | None,
        value(
            "The faults themselves, as kill@worker:1#40,stop@ps:0#60+kill@worker:0#90, or "
            "a file with one run a line.",
            "TEXT",
            Heading.FAULTS,
        ),
    ] = None,
    seed: Annotated[int, number("--seed", "What is drawn by chance.", heading=Heading.FAULTS)] = 0,
    rounds: Annotated[
        int | None,
        number("--rounds", "Faults drawn for each strategy; each one of them by default.", 1),
    ] = None,
    steps: Annotated[
        str | None,
        value(
            "The global steps after which they happen, as 150-200; those in the middle by default.",
            "A-B",
            Heading.FAULTS,
        ),
    ] = None,
    limit: Annotated[
        int,
        number("--limit", "Seconds until a task that stands still is named.", 1, Heading.FAULTS),
    ] = 10,
    slack: Annotated[
        int,
        number(
            "--slack",
            "Seconds more than promised that a machine with other work may take.",
            0,
            Heading.FAULTS,
        ),
    ] = 0,
    longest: Annotated[
        int,
        number(
            "--longest", "Seconds after which a run counts as one that hangs.", 10, Heading.FAULTS
        ),
    ] = 120,
    minutes: Annotated[
        float | None,
        value(
            "Begin no further fault after so long; the next call does the rest.",
            "MINUTES",
            Heading.FAULTS,
            parser=real("--minutes", above=True),
        ),
    ] = None,
    sample: Annotated[
        Path | None,
        value("A file of the data, which corrupt overwrites for a while.", "FILE", Heading.FAULTS),
    ] = None,
    data: RecipeData = None,
    out: Annotated[
        Path, value("The folder to write; what it has results of is not run again.", "DIR")
    ] = Path("runs/chaos"),
    **given: Any,
) -> None:
    """Break the tasks of a job, and see how it ends.

    They are killed, stopped and starved, one fault at a time.

    Example: spartito chaos mnist --strategy mirrored --workers 2 --faults kill,stop -- --epochs 3
    """
    check_linux("spartito chaos")
    from spartito.chaos.report import write_page
    from spartito.chaos.suite import Suite, chosen_strategies, survive

    program = Program.find(target, tuple(arguments or ()))
    program.check()
    suite = Suite(
        program=program,
        strategies=chosen_strategies(strategy),
        workers=workers,
        ps=ps,
        chief=chief,
        evaluator=evaluator,
        words=words_of((JobSpec, Local), given),
        kinds=_names(faults, tuple(KINDS)),
        roles=_names(roles, Suite.roles_known()),
        schedules=parse_schedules(_text(schedule)) if schedule else (),
        seed=seed,
        rounds=rounds,
        steps=_range(steps),
        limit=limit,
        slack=slack,
        longest=longest,
        minutes=minutes,
        sample=sample,
        data=data,
        out=out,
    )
    try:
        code = survive(suite)
    finally:
        write_page(out)
    raise typer.Exit(code)


def _names(text: str, all_of_them: Sequence[str]) -> list[str]:
    return list(all_of_them) if text == "all" else [one for one in text.split(",") if one]


def _text(schedule: str) -> str:
    path = Path(schedule)
    return path.read_text() if "@" not in schedule and path.is_file() else schedule


def _range(text: str | None) -> range | None:
    if text is None:
        return None
    first, _, last = text.partition("-")
    read = whole("--steps", 0)
    found = range(read(first), read(last or first) + 1)
    if not found:
        raise UserError(f"--steps {text} has no steps", "Write it as 150-200.")
    return found
