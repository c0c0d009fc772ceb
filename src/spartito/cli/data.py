"""The commands ``spartito predict`` and ``spartito data``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spartito.cli.command import Command, Group
from spartito.cli.options import Json, number, real, switch, value
from spartito.errors import UserError
from spartito.urls import is_remote

data_app = typer.Typer(cls=Group, help="Pack, look at, check, measure and fetch data sets.")

Columns = Annotated[str | None, value("Columns of packed files: a,b.", "NAMES")]


def names_in(text: str | None) -> tuple[str, ...]:
    """The names that commas part."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of spartito train.")],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", help="What to look at.")
    ] = None,
    prompt: Annotated[
        str | None, value("How a text begins, for a model that writes.", "TEXT")
    ] = None,
    length: Annotated[int | None, number("--length", "How many characters it adds.", 1)] = None,
    temperature: Annotated[
        float | None,
        value(
            "0 takes the likeliest character; above 1 is bold.", "T", parser=real("--temperature")
        ),
    ] = None,
    seed: Annotated[int | None, number("--seed", "What the characters are drawn from.")] = None,
    json: Annotated[bool, switch("--json", "One JSON object a line.")] = False,
) -> None:
    """Print what a trained model predicts.

    For pictures, or how it goes on with a text.

    Example: spartito predict runs/cats_vs_dogs cat.jpg dog.jpg

    Example: spartito predict runs/gpt --prompt "ROMEO." --temperature 0.8 --seed 1
    """
    given = {"prompt": prompt, "length": length, "temperature": temperature, "seed": seed}
    from spartito.recipes.predict import main as predict_with

    said = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(predict_with(run, files or [], said, json))


@data_app.command(cls=Command)
def pack(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A folder of images, or packed files anywhere.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new folder, or one in a store.")],
    format: Annotated[str, value("parquet, webdataset or jsonl.", "NAME")] = "parquet",
    seed: Annotated[int, number("--seed", "What the order of examples is drawn from.", 0)] = 0,
    keep_order: Annotated[
        bool, switch("--keep-order", "Leave examples as they lie, unshuffled.")
    ] = False,
    keep_corrupt: Annotated[
        bool, switch("--keep-corrupt", "Pack images undecoded, broken ones too.")
    ] = False,
    columns: Columns = None,
    shard_size: Annotated[str | None, value("Bytes of a shard, about: 64MB.", "SIZE")] = None,
    json: Json = False,
) -> None:
    """Pack examples into few large files, here or in a store.

    After a kill the same command goes on with what is missing.

    Example: spartito data pack PetImages pets --format webdataset

    Example: spartito data pack pets s3://bucket/pets --format parquet
    """
    from spartito.data.packing.command import main_pack

    code = main_pack(
        source,
        out,
        format,
        seed=seed,
        keep_order=keep_order,
        keep_corrupt=keep_corrupt,
        columns=names_in(columns),
        shard_size=shard_size,
        json=json,
    )
    raise typer.Exit(code)


@data_app.command(cls=Command)
def info(
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder of images, or packed files.")],
    columns: Columns = None,
    json: Json = False,
) -> None:
    """Say what a data set holds, and what reading it takes.

    Example: spartito data info s3://bucket/pets
    """
    from spartito.data.tools.info import main_info

    raise typer.Exit(main_info(url, names_in(columns), json))


@data_app.command(cls=Command)
def check(
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder of images, or packed files.")],
    jfif_only: Annotated[
        bool, switch("--jfif-only", "Only JPEG files with a JFIF header are right.")
    ] = False,
    remove: Annotated[bool, switch("--remove", "Delete files that are wrong.")] = False,
    move_to: Annotated[Path | None, value("Move files that are wrong there.", "DIR")] = None,
    columns: Columns = None,
    no_images: Annotated[bool, switch("--no-images", "Decode no images of packed files.")] = False,
    json: Json = False,
) -> None:
    """Find files and packed examples that are not what they say.

    Example: spartito data check PetImages --jfif-only --move-to bad

    Example: spartito data check s3://bucket/pets
    """
    if remove and move_to is not None:
        raise UserError("--remove and --move-to exclude each other", "Give one of them.")
    from spartito.data.blocks.locating import images_at

    path = images_at(url)
    of_files = {"--jfif-only": jfif_only, "--remove": remove, "--move-to": move_to is not None}
    of_packed = {"--columns": columns is not None, "--no-images": no_images}
    kind = "a folder of images" if path else "packed files"
    for option, is_given in (of_packed if path else of_files).items():
        if is_given:
            raise UserError(f"{option} of {url}, which is {kind}", "Leave the option out.")
    if path is not None and is_remote(path):
        raise UserError(
            f"{url} is a folder of images in a store, which is not checked there",
            "`spartito data pack` names broken images and leaves them out; or check a copy here.",
        )
    if path is not None:
        from spartito.data.images.check import main_check

        raise typer.Exit(main_check(path, jfif_only, remove, move_to, json))
    from spartito.data.tools.packed_check import main_packed_check

    raise typer.Exit(main_packed_check(url, names_in(columns), not no_images, json))


@data_app.command(cls=Command)
def bench(
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder of images, or packed files.")],
    seconds: Annotated[
        float,
        value("For each of five rates, at most.", "SECONDS", parser=real("--seconds", above=True)),
    ] = 5.0,
    columns: Columns = None,
    image_size: Annotated[
        int, number("--image-size", "Height and width of decoded images.", 1)
    ] = 180,
    batch_size: Annotated[int, number("--batch-size", "Examples of a batch.", 1)] = 32,
    json: Json = False,
) -> None:
    """Measure how fast examples are read, decoded and fed.

    It says what limits them: the store, decoding, or making batches.

    Example: spartito data bench s3://bucket/pets --seconds 10
    """
    from spartito.data.tools.bench import main_bench

    code = main_bench(url, seconds, names_in(columns), image_size, batch_size, json)
    raise typer.Exit(code)


@data_app.command(cls=Command)
def get(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Which one; without it all are listed.")
    ] = None,
    to: Annotated[Path | None, value("Where a folder NAME is made.", "DIR")] = None,
    mirror: Annotated[str | None, value("Where the files are, if not at home.", "URL")] = None,
    json: Json = False,
) -> None:
    """Fetch a well-known data set, and compare its checksums.

    Example: spartito data get cats_vs_dogs --to data
    """
    from spartito.data.tools.get import main_get, main_list

    if name is None:
        given = {"--to": to, "--mirror": mirror}
        for option in (option for option, value in given.items() if value is not None):
            raise UserError(f"{option} without a name", "As spartito data get mnist.")
        raise typer.Exit(main_list(json))
    raise typer.Exit(main_get(name, to, mirror, json))
