"""A copy of the data that a fault may spoil: the user's own files are only read."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spartito.errors import UserError

PREFIX = ".spartito-data-"


@dataclass(frozen=True)
class SpareData:
    """What a job reads in place of the user's data.

    Attributes:
        arguments: Those of the program, with the copy's path where the data's was.
        data: The folder of a recipe's data, or its URL.
        sample: The file that may be spoiled.
    """

    arguments: tuple[str, ...]
    data: str | None
    sample: Path | None


@contextmanager
def spare_data(
    arguments: Sequence[str], data: str | None, sample: Path | None, inside: Path
) -> Iterator[SpareData]:
    """Copy the data for a block; of all files but the sample there is a second name alone.

    Args:
        arguments: Of the program.
        data: The folder of a recipe's data, or its URL.
        sample: The file of the data that is to be spoiled; None: nothing is copied.
        inside: The folder for the copy, which is gone after the block.

    Raises:
        UserError: Nothing says where the program's data is, or it cannot be copied.
    """
    if sample is None:
        yield SpareData(tuple(arguments), data, None)
        return
    inside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=inside, ignore_cleanup_errors=True) as name:
        copy = Path(name).resolve()
        given = Path(data) if data is not None and _is_in(sample, Path(data)) else None
        replaced = [_replaced(word, sample, copy) for word in arguments]
        root = given or next((found for _, found in replaced if found), None)
        if root is None:
            raise UserError(
                f"--sample {sample} is in no folder that --data or an argument of the program "
                "names: it is a copy that is spoiled, which the program has to read",
                "Name the folder of the data by --data, or give it to the script as an argument.",
            )
        copied = _copied(root.absolute(), copy / root.absolute().name, sample.resolve())
        yield SpareData(
            tuple(word for word, _ in replaced),
            str(copy / root.name) if given else data,
            copied,
        )


def _is_in(sample: Path, root: Path) -> bool:
    return root.exists() and sample.resolve().is_relative_to(root.resolve())


def _replaced(word: str, sample: Path, copy: Path) -> tuple[str, Path | None]:
    """An argument with the copy's path in place of the data's, and that path of the data."""
    for start, text in (("", word), (f"{word.partition('=')[0]}=", word.partition("=")[2])):
        if text and len(Path(text).absolute().parts) > 1 and _is_in(sample, Path(text)):
            path = Path(text).absolute()
            return f"{start}{copy / path.name}", path
    return word, None


def _copied(root: Path, to: Path, sample: Path) -> Path:
    """Have all of ``root`` at ``to``, the sample as a file of its own; returns where that is."""
    try:
        if root.is_file():
            shutil.copyfile(sample, to)
            return to
        found = list[Path]()
        _copy(root, to, sample, found)
    except OSError as error:
        raise UserError(f"{root} cannot be copied to {to}: {error.strerror or error}") from error
    if not found:
        raise UserError(f"{sample} was not found again in {root}")
    return found[0]


def _copy(folder: Path, to: Path, sample: Path, found: list[Path]) -> None:
    to.mkdir()
    for path in folder.iterdir():
        there = to / path.name
        if path.name.startswith(PREFIX):  # this copy, where it lies inside of the data
            continue
        if path.is_dir() and (not path.is_symlink() or sample.is_relative_to(path.resolve())):
            _copy(path, there, sample, found)
        elif path.resolve() != sample:
            _link(path.resolve(), there)
        elif found:
            _link(found[0], there)
        else:
            shutil.copyfile(sample, there)
            found.append(there)


def _link(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except OSError:  # a folder, another file system, or one that has no such links
        os.symlink(path, to)
