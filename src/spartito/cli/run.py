"""The commands ``spartito run`` and ``spartito train``: they start the processes of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from spartito.cli.options import job_of, number, switch, taken_from, typed, value, with_options
from spartito.errors import UserError
from spartito.launch.earlier_run import vacate
from spartito.launch.functions.run import OF_FILES
from spartito.launch.hosts.job import Hosts
from spartito.launch.job import Heading, JobSpec, Launcher, Program
from spartito.launch.on_ray.job import OnRay
from spartito.launch.processes.launcher import Processes
from spartito.launch.processes.local import Local
from spartito.names import ENV_RUN_DIR, PRECISIONS, RECIPES, nearest, new_run_folder
from spartito.notes import say


def _precision(text: str) -> str:
    if text not in PRECISIONS:
        raise UserError(f"--precision {text} is unknown", nearest(text, PRECISIONS))
    return text


@with_options(
    *(JobSpec, Local, Hosts, OnRay),
    first=("strategy", "workers", "ps", "hosts", "recover", "log_dir", "module"),
    without=OF_FILES,
)
def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the module.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS...", help="Its own arguments.")
    ] = None,
    module: Annotated[bool, switch("-m", "Run a module, as python -m.")] = False,
    **given: Any,
) -> None:
    """Run your script in several processes.

    Example: spartito run --strategy mirrored --workers 2 train.py --epochs 3
    """
    words = [script, *(arguments or [])]
    if hint := _misplaced(context, words):
        say(f"note: {hint}")
    program = Program(script, tuple(words[1:]), "module" if module else "script")
    raise typer.Exit(launcher_of(given).start(job_of(program, given)))


@with_options(
    *(JobSpec, Local, Hosts, OnRay),
    first=("strategy", "workers", "epochs", "batch_size", "data", "out", "resume"),
    without=("name",),
)
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help=f"One of {', '.join(RECIPES)}.")],
    epochs: Annotated[int | None, number("--epochs", "Passes over the data.", 1)] = None,
    batch_size: Annotated[
        int | None, number("--batch-size", "Examples per step, over all workers.", 1)
    ] = None,
    seed: Annotated[
        int | None, number("--seed", "Where all randomness begins.", heading=Heading.TRAINING)
    ] = None,
    precision: Annotated[
        str | None,
        value(
            f"What the forward pass computes in: {', '.join(PRECISIONS)}.",
            "NAME",
            Heading.TRAINING,
            parser=_precision,
        ),
    ] = None,
    resume: Annotated[
        bool, switch("--resume", "Continue from the run folder's newest checkpoint.")
    ] = False,
    overwrite: Annotated[
        bool,
        switch(
            "--overwrite", "Move an earlier run in --out aside, and begin anew.", Heading.OUTPUT
        ),
    ] = False,
    json: Annotated[bool, switch("--json", "Print one last line of JSON.", Heading.OUTPUT)] = False,
    **given: Any,
) -> None:
    """Train a built-in recipe.

    It ends with the paths of the model and the report.

    Example: spartito train mnist --strategy mirrored --workers 2 --epochs 3
    """
    from spartito.cluster.resolver import joined

    if recipe not in RECIPES:
        hint = f"To run a script: spartito run {recipe}" if recipe.endswith(".py") else ""
        raise UserError(f"{recipe!r} is not a recipe", hint or nearest(recipe, RECIPES))
    values = {
        "--epochs": epochs,
        "--batch-size": batch_size,
        "--seed": seed,
        "--precision": precision,
    }
    arguments = [f"{name}={value}" for name, value in values.items() if value is not None]
    arguments += [name for name, on in {"--resume": resume, "--json": json}.items() if on]
    job = job_of(Program(recipe, tuple(arguments), "recipe"), given)
    alone = given["hosts"] is not None or joined(os.environ) is None
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other", "Leave one out.")
    if alone and not resume:
        # All tasks start here: all get the one name.
        named = job.out or os.environ.get(ENV_RUN_DIR) or new_run_folder(recipe)
        job = replace(job, out=Path(named))
        if aside := vacate(Path(named), overwrite, os.environ):
            say(f"the earlier run is in {aside} now")
    raise typer.Exit(launcher_of(given, result=json).start(job))


def launcher_of(given: Mapping[str, Any], result: bool = False) -> Launcher:
    """What starts the job: a Ray cluster, several machines by ssh, else this machine.

    Raises `UserError` for options that belong to another.
    """
    if given.get("ray") is not None:
        if wrong := [*typed(Local, given, beside=OnRay), *typed(Hosts, given, beside=OnRay)]:
            raise UserError(f"--ray and {' '.join(wrong)} exclude each other", "Leave them out.")
        return OnRay(**taken_from(OnRay, given), result=result)
    beside = (Local, Hosts) if given["hosts"] is None else (Hosts,)
    if wrong := [
        flag for flag in typed(OnRay, given) if all(flag not in typed(one, given) for one in beside)
    ]:
        raise UserError(f"{' '.join(wrong)} without --ray", "Name the cluster: --ray auto")
    kind, other = (Hosts, Local) if given["hosts"] is not None else (Local, Hosts)
    if wrong := typed(other, given, beside=Processes):
        if kind is Local:
            raise UserError(
                f"{' '.join(wrong)} without --hosts", "Name the machines: --hosts a,b,c"
            )
        raise UserError(
            f"--hosts and {' '.join(wrong)} exclude each other",
            "--hosts starts all machines from here; --nnodes starts one of them, by hand.",
        )
    return kind(**taken_from(kind, given), result=result)


def _misplaced(context: typer.Context, words: list[str]) -> str | None:
    """What to say about an option of ours that stands behind the script, whose it is then.

    None where there is none, or where it was given before the script as well.
    """
    source_of: Any = context.get_parameter_source
    left_out = {
        option
        for parameter in context.command.params
        if parameter.name and source_of(parameter.name).name == "DEFAULT"
        for option in parameter.opts
        if option.startswith("--")
    }
    found = next((word for word in words[1:] if word.partition("=")[0] in left_out), None)
    if found is None:
        return None
    option = found.partition("=")[0]
    return (
        f"{option} behind {words[0]} is the script's own; "
        f"for Spartito write it before: spartito run {option} ... {words[0]}"
    )
