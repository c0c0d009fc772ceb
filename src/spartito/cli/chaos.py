"""The command ``spartito chaos``: what a job does when its tasks fail, one fault at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from spartito.chaos.schedule import KINDS, parse_schedules
from spartito.chaos.suite import Suite, chosen_strategies, survive
from spartito.cli.options import (
    Arguments,
    RecipeData,
    Target,
    taken_from,
    value,
    whole,
    with_options,
    words_of,
)
from spartito.errors import UserError
from spartito.launch.job import Heading, JobSpec, Program
from spartito.launch.processes.local import Local
from spartito.system import check_linux

OWN = ("workers", "ps", "chief", "evaluator")
"""Options of a job that the suite says anew for each strategy."""


@with_options(
    *(Suite, JobSpec, Local),
    first=("strategy", "workers", "ps", "faults", "roles", "rounds", "out"),
    without=("name", "log_dir", "yes", "nnodes", "node_rank", "master_addr"),
)
def chaos(
    target: Target,
    arguments: Arguments = None,
    strategy: Annotated[
        str, value("Under which: all, or some with commas, options in parentheses.", "STRATEGIES")
    ] = "mirrored",
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
    steps: Annotated[
        str | None,
        value(
            "The global steps after which they happen, as 150-200; those in the middle by default.",
            "A-B",
            Heading.FAULTS,
        ),
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

    program = Program.find(target, tuple(arguments or ()))
    program.check()
    suite = Suite(
        program=program,
        strategies=chosen_strategies(strategy),
        words=words_of((JobSpec, Local), {k: v for k, v in given.items() if k not in OWN}),
        kinds=_names(faults, tuple(KINDS)),
        roles=_names(roles, Suite.roles_known()),
        schedules=parse_schedules(_text(schedule)) if schedule else (),
        steps=_range(steps),
        data=data,
        out=out,
        **taken_from(Suite, given),
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
