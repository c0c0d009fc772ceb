"""The program of a job and the paths in its file, checked before anything starts."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from spartito.errors import UserError
from spartito.names import RECIPES

HOME = re.compile(r"~[A-Za-z0-9_.-]*")
"""Somebody's home, as a shell knows it."""


def quoted(path: str) -> str:
    """``path`` as a word of a POSIX shell, which puts its own home for a ``~`` in front."""
    home, slash, rest = path.partition("/")
    if HOME.fullmatch(home):
        return home + slash + (shlex.quote(rest) if rest else "")
    return shlex.quote(path)


def check_data(folder: Path | None) -> None:
    """Raise `UserError` where the folder with the data is given but not there."""
    if folder is not None and not folder.is_dir():
        raise UserError(f"--data {folder} is no folder", f"The folder we are in is {Path.cwd()}.")


def inside_here(path: Path) -> Path | None:
    """``path`` relative to the present folder; None where it is outside."""
    found = path.resolve()
    here = Path.cwd()
    return found.relative_to(here) if found.is_relative_to(here) else None


def seen_from_here(path: Path) -> str:
    """``path`` as a file in this folder names it: ``./data``, or whole where it is outside."""
    inside = inside_here(path)
    return str(path.resolve()) if inside is None else f"./{inside}" if inside.parts else "."


def named_here(what: str, path: Path) -> str:
    """As `seen_from_here`.

    Raises `UserError` for characters that who reads the file would take for something else.
    """
    found = seen_from_here(path)
    if bad := re.search(r"[:$\x00-\x1f\x7f]", found):
        raise UserError(f"{what} {found!r} has {bad[0]!r}, which the tool would read", "Rename it.")
    return found


def check_program(argv: Sequence[str], module: bool) -> None:
    """Raise `UserError` where Python could not run the script, or with ``module`` the module.

    Nothing of the program is imported.
    """
    if not argv or not argv[0]:
        raise UserError(
            f"the name of the {'module' if module else 'script'} is empty",
            "Write it as: spartito run train.py",
        )
    if module:
        module_file(argv[0])
    else:
        _check_script(argv[0])


def _check_script(name: str) -> None:
    script = Path(name)
    if script.is_dir() and not (script / "__main__.py").is_file():
        raise UserError(
            f"{name!r} is a folder without a __main__.py, no script",
            f"Name a file in it, as {script / 'train.py'}.",
        )
    if script.exists():
        return
    beside = [str(p) for p in script.parent.glob("*.py")] if script.parent.is_dir() else []
    close = get_close_matches(name, beside, n=1)
    advice = f"Did you mean {close[0]!r}?" if close else f"The folder we are in is {Path.cwd()}."
    if name in RECIPES:
        advice = f"The recipe of this name starts with: spartito train {name}"
    raise UserError(f"there is no script {name!r}", advice)


def module_file(name: str) -> Path:
    """The file that Python runs for a module; nothing is imported.

    Args:
        name: Of the module, or of a package that has a ``__main__``.

    Raises:
        UserError: Python could not run it.
    """
    spec: ModuleSpec | None = None
    locations: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    path = ""
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        spec = _find(path, locations)
        if spec is None:
            raise UserError(f"there is no module named {path!r}", "Is its package installed?")
        locations = spec.submodule_search_locations
    if locations is not None:
        spec = _find(f"{name}.__main__", locations)
    if spec is None:
        raise UserError(
            f"{name!r} is a package without a __main__.py, which Python cannot run",
            f"Name a module in it, as -m {name}.train.",
        )
    return Path(spec.origin or "")


def _find(name: str, locations: Sequence[str] | None) -> ModuleSpec | None:
    """Where a module is; ``locations`` are those of its package, or of all packages."""
    if locations is None or not name.rpartition(".")[2].isidentifier():
        return None  # what it is to be part of is no package
    found = PathFinder.find_spec(name, list(locations))
    if found is not None or "." in name or name == "__main__":
        return found
    return find_spec(name)  # other finders may know it, as those of editable installations
