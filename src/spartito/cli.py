"""The command ``spartito``: it reads words and hands them on; torch is never imported to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from spartito.cli_cluster import cluster_app
from spartito.errors import EXIT_INTERRUPTED, SpartitoError, UserError, show
from spartito.names import PRECISIONS, RECIPES, STRATEGIES, nearest

PASS_ON = {"allow_interspersed_args": False}
"""Everything after the script belongs to the script, options too."""

app = typer.Typer(
    help="Train any PyTorch model under any distribution strategy.\n\n"
    "Example: spartito train mnist --strategy mirrored --workers 2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Look after data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(cluster_app, name="cluster")


def _whole(option: str, least: int | None = None) -> Callable[[str], int]:
    """Reads the whole number of ``option``; its error names what came."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise UserError(f"{option} {text} is not a whole number") from None
        if least is not None and number < least:
            raise UserError(f"{option} {number} is less than {least}")
        return number

    return read


def _precision(text: str) -> str:
    if text not in PRECISIONS:
        raise UserError(f"--precision {text} is unknown", nearest(text, PRECISIONS))
    return text


Strategy = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(STRATEGIES)}.", metavar="NAME")
]
Options = Annotated[
    str | None,
    typer.Option(help="The strategy's keyword arguments, a JSON object.", metavar="JSON"),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Processes on this machine; one per GPU, or one, by default.",
        parser=_whole("--workers", 1),
        metavar="N",
    ),
]
Servers = Annotated[
    int | None,
    typer.Option(
        "--ps",
        help="Parameter servers on this machine; the strategy is then parameter_server.",
        parser=_whole("--ps", 1),
        metavar="N",
    ),
]
Evaluator = Annotated[
    bool,
    typer.Option("--evaluator", help="A task of its own that evaluates each checkpoint."),
]
Chief = Annotated[
    bool,
    typer.Option(
        "--chief",
        help="With --ps: a task of its own that hands out the work, not worker 0.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one last line of JSON.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (by default the process's own); answers the exit code."""
    try:
        app(args=None if argv is None else list(argv), prog_name="spartito")
    except SpartitoError as error:
        return show(error)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"spartito {version('spartito')}")
        raise typer.Exit


@app.callback()
def _spartito(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


@app.command(context_settings=PASS_ON)
def run(
    script: Annotated[str, typer.Argument(help="The script, or with -m the module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS...", help="Its own arguments.")
    ] = None,
    strategy: Strategy = None,
    strategy_options: Options = None,
    workers: Workers = None,
    ps: Servers = None,
    evaluator: Evaluator = False,
    chief: Chief = False,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m.")] = False,
    nnodes: Annotated[
        int, typer.Option(help="Machines in the job.", parser=_whole("--nnodes", 1), metavar="N")
    ] = 1,
    node_rank: Annotated[
        int,
        typer.Option(
            help="Which of them this is, from 0.", parser=_whole("--node-rank", 0), metavar="N"
        ),
    ] = 0,
    master_addr: Annotated[
        str | None, typer.Option(help="Where they meet: the first machine.", metavar="HOST:PORT")
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            help="Let a task run a share of the time only, as worker:1=0.25; for trials.",
            metavar="TASK=SHARE",
        ),
    ] = None,
) -> None:
    """Run your script in several processes.

    Example: spartito run --strategy mirrored --workers 2 train.py --epochs 3
    """
    from spartito.launch import launch, slow_tasks

    code = launch(
        [script, *(arguments or [])],
        module=module,
        workers=workers,
        ps=ps or 0,
        evaluator=evaluator,
        chief=chief,
        strategy=strategy,
        strategy_options=strategy_options,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        slow=slow_tasks(slow or []),
    )
    raise typer.Exit(code)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help=f"One of {', '.join(RECIPES)}.")],
    strategy: Strategy = None,
    workers: Workers = None,
    ps: Servers = None,
    evaluator: Evaluator = False,
    chief: Chief = False,
    out: Annotated[Path | None, typer.Option(help="The run folder to write.")] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the data.", parser=_whole("--epochs", 1), metavar="N"),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The folder with the data.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Examples per step, over all workers.",
            parser=_whole("--batch-size", 1),
            metavar="N",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Where all randomness begins.", parser=_whole("--seed"), metavar="N"),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help=f"What the forward pass computes in: {' or '.join(PRECISIONS)}.",
            parser=_precision,
            metavar="NAME",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run folder's newest checkpoint.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a built-in recipe; it ends with the paths of the model and the report.

    Example: spartito train mnist --strategy mirrored --workers 2 --epochs 3
    """
    from spartito.launch import launch

    if recipe not in RECIPES:
        raise UserError(f"{recipe!r} is not a recipe", nearest(recipe, RECIPES))
    given = {
        "--out": out,
        "--epochs": epochs,
        "--data": data,
        "--batch-size": batch_size,
        "--seed": seed,
        "--precision": precision,
    }
    arguments = [f"{name}={value}" for name, value in given.items() if value is not None]
    switches = {"--resume": resume, "--json": json}
    arguments += [name for name, on in switches.items() if on]
    code = launch(
        [f"spartito.recipes.{recipe}", *arguments],
        module=True,
        workers=workers,
        ps=ps or 0,
        evaluator=evaluator,
        chief=chief,
        strategy=strategy,
        result=json,
    )
    raise typer.Exit(code)


@app.command()
def compare(
    target: Annotated[str, typer.Argument(help=f"Your script, or one of {', '.join(RECIPES)}.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGS...", help="The script's own arguments."),
    ] = None,
    strategies: Annotated[
        str, typer.Option(help="Which to compare: all, or some with commas.", metavar="NAMES")
    ] = "all",
    workers: Workers = None,
    ps: Annotated[
        int | None,
        typer.Option(
            "--ps",
            help="Parameter servers, for the strategy that has them; 1 by default.",
            parser=_whole("--ps", 1),
            metavar="N",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the data.", parser=_whole("--epochs", 1), metavar="N"),
    ] = None,
    goal: Annotated[
        str | None, typer.Option(help="What to reach, as val_accuracy=0.95.", metavar="NAME=VALUE")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="More runs: workers=1,2,4, or for recipes batch_size=32,512,8192.",
            metavar="NAME=VALUES",
        ),
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            help="Let a task run a share of the time only, as worker:1=0.25.",
            metavar="TASK=SHARE",
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The folder with a recipe's data.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="A recipe's examples per step, over all workers.",
            parser=_whole("--batch-size", 1),
            metavar="N",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Where a recipe's randomness begins.", parser=_whole("--seed"), metavar="N"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write.", metavar="DIR")] = None,
) -> None:
    """Train under several strategies, and lay them side by side on one page.

    Example: spartito compare mnist --workers 2 --ps 1 --epochs 5 --goal val_accuracy=0.95
    """
    from spartito.launch.compare import compare_strategies
    from spartito.launch.compare_plan import make_plan

    plan = make_plan(
        target,
        arguments or [],
        strategies=strategies,
        workers=2 if workers is None else workers,
        ps=ps,
        epochs=epochs,
        goal=goal,
        sweeps=sweep or [],
        slow=slow or [],
        data=data,
        batch_size=batch_size,
        seed=seed,
        out=out,
    )
    raise typer.Exit(compare_strategies(plan))


@app.command()
def doctor(
    workers: Annotated[
        int | None,
        typer.Option(
            help="Examine so many processes started here, not the cluster we are in.",
            parser=_whole("--workers", 1),
            metavar="N",
        ),
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
    from spartito.launch.doctor.examination import examine, examine_here

    if workers is None:
        raise typer.Exit(examine(timeout, as_json=json))
    raise typer.Exit(examine_here(workers, timeout, as_json=json))


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run folder of spartito train.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="What to look at.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Say what a trained model sees in files.

    Example: spartito predict runs/cats_vs_dogs cat.jpg dog.jpg
    """
    from spartito.recipes.predict import main as predict_files

    raise typer.Exit(predict_files(run, files, json))


@data_app.command()
def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="One folder per class.")],
    jfif_only: Annotated[
        bool, typer.Option("--jfif-only", help="Only JPEG files with a JFIF header are right.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Delete what is wrong.")] = False,
    move_to: Annotated[
        Path | None, typer.Option(help="Move what is wrong there.", metavar="DIR")
    ] = None,
    json: Json = False,
) -> None:
    """Find files that are not what they say.

    Example: spartito data check PetImages --jfif-only --move-to bad
    """
    if remove and move_to is not None:
        raise UserError("--remove and --move-to exclude each other", "Give one of them.")
    from spartito.data.check import main_check

    raise typer.Exit(main_check(directory, jfif_only, remove, move_to, json))
