"""The command ``spartito``: it reads words and hands them on; torch is never imported to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

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
) -> None:
    """Run your script in several processes.

    Example: spartito run --strategy mirrored --workers 2 train.py --epochs 3
    """
    from spartito.launch import launch

    code = launch(
        [script, *(arguments or [])],
        module=module,
        workers=workers,
        strategy=strategy,
        strategy_options=strategy_options,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
    )
    raise typer.Exit(code)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help=f"One of {', '.join(RECIPES)}.")],
    strategy: Strategy = None,
    workers: Workers = None,
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
        strategy=strategy,
        result=json,
    )
    raise typer.Exit(code)


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
