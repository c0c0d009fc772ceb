"""The command ``spartito plan``: which strategy, before anything is started."""

from __future__ import annotations

import json as json_
import os
from pathlib import Path
from typing import Annotated

import typer

from spartito.cli.options import RecipeData, number, real, switch, value, with_options
from spartito.errors import UserError
from spartito.launch.job import Heading
from spartito.names import RECIPES


@with_options(first=("workers", "machines", "link", "strategies", "batch_size", "goal", "memory"))
def plan(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="SCRIPT|RECIPE",
            help=f"Your script, or one of {', '.join(RECIPES)}; --profile may stand for it.",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS...", help="The script's own arguments.")
    ] = None,
    workers: Annotated[
        int | None, number("--workers", "Tasks that compute, on each machine; 2 by default.", 1)
    ] = None,
    machines: Annotated[
        int | None, number("--machines", "Machines like this one; 1 by default.", 1)
    ] = None,
    link: Annotated[
        str | None,
        value(
            "The line between machines: a rate, and how long a packet is on its way one "
            "way, as 1gbit or 50mbit,80ms.",
            "RATE[,DELAY]",
        ),
    ] = None,
    on: Annotated[
        Path | None, value("A YAML file that describes the machines.", "FILE", Heading.MACHINES)
    ] = None,
    ps: Annotated[
        int,
        number("--ps", "Parameter servers, for the strategy that has them.", 1, Heading.WORKERS),
    ] = 1,
    strategies: Annotated[
        str,
        value(
            "all, or some with commas; options in parentheses, as 'mirrored, local_sgd(every=50)'.",
            "STRATEGIES",
        ),
    ] = "all",
    batch_size: Annotated[
        int | None,
        number(
            "--batch-size",
            "Examples per step, over all workers; by default those of the profile.",
            1,
        ),
    ] = None,
    memory: Annotated[str | None, value("What a task may have, as 16GB.", "SIZE")] = None,
    goal: Annotated[
        str | None,
        value(
            "How much is trained: epochs=5, steps=1000, examples=1e6 or tokens=1e9.", "NAME=VALUE"
        ),
    ] = None,
    price: Annotated[
        float | None,
        value(
            "Of one machine for an hour, for the price of the goal.",
            "X",
            Heading.MACHINES,
            parser=real("--price"),
        ),
    ] = None,
    fail: Annotated[
        str | None, value("How often one machine fails, as 1/day.", "N/TIME", Heading.MACHINES)
    ] = None,
    profile: Annotated[
        Path | None, value("Plan with this profile: nothing is run.", "FILE", Heading.PROFILE)
    ] = None,
    save_profile: Annotated[
        Path | None, value("Keep the profile in this new file.", "FILE", Heading.PROFILE)
    ] = None,
    check: Annotated[
        Path | None,
        value(
            "Predict the runs of this comparison instead, and show both.", "DIR", Heading.PROFILE
        ),
    ] = None,
    data: RecipeData = None,
    out: Annotated[
        Path | None,
        value(
            "Write a page with pictures, the figures, and a trace of a step there.",
            "DIR",
            Heading.OUTPUT,
        ),
    ] = None,
    json: Annotated[
        bool, switch("--json", "Print one line of JSON instead.", Heading.OUTPUT)
    ] = False,
) -> None:
    """Predict speed and memory of every strategy.

    It takes some seconds of one process on this machine.

    Example: spartito plan train.py --machines 4 --workers 2 --link 1gbit

    Example: spartito plan gpt --workers 2 --save-profile gpt.json

    Example: spartito plan --profile gpt.json --on cluster.yaml --goal tokens=1e9 --fail 1/day
    """
    from spartito.comparison.report.results import COMPARISON
    from spartito.declared import parse_all
    from spartito.launch.job import Program
    from spartito.launch.lines.line import Link
    from spartito.planning.check import check as check_runs
    from spartito.planning.cluster import Cluster, Kind, read_failures, read_size
    from spartito.planning.costs.parts import Situation
    from spartito.planning.measure import crowds_of, take_profile
    from spartito.planning.page import write_plan
    from spartito.planning.profile import Profile, source_of
    from spartito.planning.search import ALL, Goal, improvements, search
    from spartito.planning.table import Plan, record, text
    from spartito.system.capacity import available_cores, memory_limit

    program = None if target is None else Program.find(target, tuple(arguments or ()))
    if program is not None and program.kind == "recipe" and program.arguments:
        raise UserError(
            f"{program.arguments[0]!r} after {target}: a recipe takes no arguments of its own",
            "Its options are those of spartito plan.",
        )
    if data is not None and (program is None or program.kind != "recipe"):
        raise UserError(
            "--data is for recipes", "A script has its own arguments: give them after --."
        )
    if program is None and profile is None:
        raise UserError(
            "neither a script nor a profile", "As spartito plan train.py, or --profile p.json."
        )
    if save_profile is not None and profile is not None:
        raise UserError("--profile and --save-profile exclude each other", "It is saved already.")
    if save_profile is not None and os.path.lexists(save_profile):
        raise UserError(
            f"--save-profile {save_profile} is there already", "Name a new file, or remove it."
        )
    if on is not None and (machines is not None or link is not None or price is not None):
        raise UserError(
            "--on and --machines, --link or --price exclude each other", "Say it in the file."
        )
    if save_profile is not None and not save_profile.parent.is_dir():
        raise UserError(
            f"--save-profile {save_profile}: {save_profile.parent} is no folder", "Make it first."
        )
    if check is not None and not ((check / COMPARISON).is_file() or check.is_file()):
        raise UserError(
            f"--check {check} is no comparison", "Name the folder that --out named in comparing."
        )
    if strategies != ALL:
        parse_all(strategies, "--strategies")  # before anything is measured
    wanted = None if goal is None else Goal.read(goal)
    limit = None if memory is None else read_size(memory, "--memory")
    rate = 0.0 if fail is None else read_failures(fail)
    line = None if link is None else Link.read(link)
    read = None
    if profile is not None:
        read = Profile.read(profile)
        if program is not None:
            read.check_target(program.title, source_of(program.script, program.arguments))
    cores = available_cores() if read is None else read.machine.cores
    own = memory_limit() if read is None else read.machine.memory
    if on is not None:
        cluster = Cluster.read(on, workers, ps, cores, own)
    else:
        here = Kind("machine", machines or 1, cores, own, price or 0.0)
        cluster = Cluster((here,), workers or 2, line, ps)
    if read is None:
        assert program is not None, "checked above"
        kept = save_profile is not None or check is not None
        lines = cluster.machines > 1 or kept
        asked = cluster.beside if cluster.beside > cores else 2 * cores if kept else 0
        read = take_profile(program, data, batch_size, lines, crowds_of(asked, cores))
    if save_profile is not None:
        with save_profile.open("x") as file:
            file.write(read.text())
    if check is not None:
        checked = check_runs(check, read, cluster)
        print(json_.dumps(checked.record()) if json else checked)
        return
    situation = Situation(read, cluster, batch_size or read.batch_size)
    if wanted is not None:
        wanted.examples(situation)
    outcome = search(situation, strategies, limit, rate)
    better = improvements(outcome, strategies, limit, rate)
    found = Plan(outcome, target or read.target, wanted, better, rate)
    page = None if out is None else write_plan(out, found)
    if json:
        print(json_.dumps(record(found)))
    else:
        print(text(found))
        if page is not None:
            print(f"Pictures:      {page}")
