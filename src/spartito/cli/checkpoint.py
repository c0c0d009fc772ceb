"""The commands ``spartito checkpoint``: show, verify, convert, average."""

from __future__ import annotations

import json as json_
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spartito.cli.command import Command, Group
from spartito.cli.options import Json
from spartito.errors import UserError
from spartito.names import aligned, size

if TYPE_CHECKING:
    from spartito.checkpoint.foreign_files import Opened

checkpoint_app = typer.Typer(cls=Group, help="Look at checkpoints, check and convert them.")

Source = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A checkpoint, a folder of them (the newest), a .safetensors or torch file; a "
        "checkpoint also by its URL in a store.",
    ),
]
Out = Annotated[
    Path,
    typer.Argument(
        metavar="OUT",
        help="NAME.safetensors, NAME.pt (a torch state_dict), or a directory (a checkpoint).",
    ),
]


@checkpoint_app.command(cls=Command)
def show(path: Source, json: Json = False) -> None:
    """Say what is in a checkpoint.

    Example: spartito checkpoint show runs/mnist
    """
    from spartito.checkpoint.foreign_files import opened
    from spartito.checkpoint.in_store import fetch_checkpoint

    found = opened(fetch_checkpoint(path))
    facts = _facts(found)
    if json:
        print(json_.dumps(facts))
        return
    print(f"{found.path}: {found.kind}")
    for name, value in facts["about"].items():
        print(f"  {name}: {value}")
    for section, tensors in facts["sections"].items():
        count = len(tensors)
        files = sorted({file for each in tensors.values() for file in each["files"]})
        bytes_ = size(sum(each["bytes"] for each in tensors.values()))
        where = f" in {', '.join(files)}" if len(files) <= 2 else f" in {len(files)} files"
        print(f"\n{section}: {count} tensors, {bytes_}{where if files else ''}")
        for line in _table(tensors) if section == "model" else ():
            print(f"  {line}")


@checkpoint_app.command(cls=Command)
def verify(path: Source) -> None:
    """Compare all files with their checksums; every part of every tensor must be there.

    A folder has all of its checkpoints verified.

    Example: spartito checkpoint verify runs/mnist
    """
    from spartito.checkpoint.foreign_files import check, checkpoints_in
    from spartito.checkpoint.in_store import fetch_checkpoint

    found = checkpoints_in(fetch_checkpoint(path))
    if not found:
        raise UserError(
            f"{path} holds no checkpoint", "Name a checkpoint's directory, or a folder of them."
        )
    wrong: list[UserError] = []
    for each in found:
        try:
            count = sum(len(tensors) for tensors in _facts(check(each))["sections"].values())
            print(f"{each}: whole, {count} tensors")
        except UserError as error:
            print(f"{each}: damaged")
            wrong.append(error)
    if wrong:
        raise wrong[0]


@checkpoint_app.command(cls=Command)
def convert(path: Source, out: Out) -> None:
    """Write a checkpoint's model as one file, or a model's file as a checkpoint.

    Example: spartito checkpoint convert runs/mnist model.safetensors
    """
    from spartito.checkpoint.convert import convert as converted
    from spartito.checkpoint.foreign_files import opened
    from spartito.checkpoint.in_store import fetch_checkpoint

    print(f"wrote {converted(opened(fetch_checkpoint(path)), out)}")


@checkpoint_app.command(cls=Command)
def average(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH... OUT", help="What to average; where to write.")
    ],
) -> None:
    """Write the mean of several models: floating numbers added up in fp64, integers of the last.

    Example: spartito checkpoint average c/step-00000100 c/step-00000200 mean.safetensors
    """
    from spartito.checkpoint.convert import average as averaged
    from spartito.checkpoint.foreign_files import opened
    from spartito.checkpoint.in_store import fetch_checkpoint

    *sources, out = paths
    found = [opened(fetch_checkpoint(path)) for path in sources]
    print(f"wrote {averaged(found, Path(out))}")


def _facts(found: Opened) -> dict[str, Any]:
    """What is in it, as JSON."""
    sections = {
        section: {
            name: {
                "shape": list(tensors.shape(name)),
                "dtype": str(tensors.dtype(name)).removeprefix("torch."),
                "bytes": 0 if name in tensors.aliases else _bytes(tensors, name),
                "files": [file.name for file in tensors.files_of(name)],
                **({"same_as": tensors.aliases[name]} if name in tensors.aliases else {}),
            }
            for name in tensors.names
        }
        for section, tensors in found.sections.items()
    }
    trainer = found.trees.get("trainer")
    position = {key: trainer[key] for key in ("step", "epoch")} if trainer else {}
    return {
        "path": str(found.path),
        "kind": found.kind,
        "about": {**position, **found.about},
        "sections": sections,
    }


def _bytes(tensors: Any, name: str) -> int:
    return int(math.prod(tensors.shape(name)) * tensors.dtype(name).itemsize)


def _table(tensors: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each tensor, in columns."""
    rows = [
        (
            name,
            "x".join(map(str, each["shape"])) or "one",
            each["dtype"],
            f"is {each['same_as']}" if "same_as" in each else size(each["bytes"]),
            f"{len(each['files'])} files" if len(each["files"]) > 1 else "",
        )
        for name, each in tensors.items()
    ]
    return aligned(rows)
