"""The commands ``spartito predict`` and ``spartito data``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from spartito.cli.options import Json, number
from spartito.errors import UserError

data_app = typer.Typer(help="Check data sets.", no_args_is_help=True)


def predict(
    run: Annotated[Path, typer.Argument(help="A run folder of spartito train.")],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE...]", help="What to look at.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="How a text begins, for a model that writes.", metavar="TEXT")
    ] = None,
    length: Annotated[int | None, number("--length", "How many characters it adds.", 1)] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the likeliest character; above 1 is bold.", metavar="T"),
    ] = None,
    seed: Annotated[int | None, number("--seed", "What the characters are drawn from.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Print what a trained model predicts for files, or how it goes on with a text.

    Example: spartito predict runs/cats_vs_dogs cat.jpg dog.jpg

    Example: spartito predict runs/gpt --prompt "ROMEO." --temperature 0.8 --seed 1
    """
    if temperature is not None and not 0 <= temperature < math.inf:
        raise UserError(f"--temperature {temperature} is not 0 or more")
    given = {"prompt": prompt, "length": length, "temperature": temperature, "seed": seed}
    from spartito.recipes.predict import main as predict_with

    said = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(predict_with(run, files or [], said, json))


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
