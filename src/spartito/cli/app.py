"""The command ``spartito``: it reads words and hands them on; torch is never imported to start."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from spartito.cli.cluster import cluster_app
from spartito.cli.compare import compare
from spartito.cli.doctor import doctor
from spartito.cli.run import PASS_ON, run, train
from spartito.errors import EXIT_INTERRUPTED, SpartitoError, UserError, show

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
app.command(context_settings=PASS_ON)(run)
app.command()(train)
app.command()(compare)
app.command()(doctor)

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
