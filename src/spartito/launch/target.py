"""Checks that all who write a job's file share: its strategy, its script, and its paths."""

from __future__ import annotations

import json
from pathlib import Path

from spartito.errors import UserError
from spartito.launch.roles import PARAMETER_SERVER, Roles
from spartito.names import RECIPES, STRATEGIES, nearest


def choose_strategy(strategy: str | None, options: str | None, roles: Roles) -> str:
    """The strategy's name, chosen by ``roles`` where None is given.

    ``options`` are its keyword arguments as JSON. Raises `UserError` for what cannot be.
    """
    if strategy is not None and strategy not in STRATEGIES:
        raise UserError(f"{strategy!r} is not a strategy", nearest(strategy, STRATEGIES))
    roles.check(strategy, source=None, machines=1)
    several = "multi_worker_mirrored" if roles.workers > 1 else "one_device"
    chosen = strategy or (PARAMETER_SERVER if roles.ps else several)
    if chosen == "one_device" and roles.workers > 1:
        raise UserError(
            f"one_device trains in one task, but --workers {roles.workers} asks for more",
            "Use --strategy multi_worker_mirrored, or --workers 1.",
        )
    if options is not None:
        check_options(options)
    return chosen


def find_script(target: str) -> Path | None:
    """The script that ``target`` names, None for a recipe; `UserError` where it is neither."""
    if target in RECIPES:
        return None
    script = Path(target)
    if not script.is_file():
        raise UserError(f"{target!r} is neither a script nor a recipe", nearest(target, RECIPES))
    return script


def check_folder(option: str, folder: Path | None) -> None:
    """Raise `UserError` where ``folder``, the value of ``option``, is given but not there."""
    if folder is not None and not folder.is_dir():
        raise UserError(f"{option} {folder} is no folder", f"The folder we are in is {Path.cwd()}.")


def inside_here(path: Path) -> Path | None:
    """``path`` relative to the present folder; None where it is outside."""
    found = path.resolve()
    here = Path.cwd()
    return found.relative_to(here) if found.is_relative_to(here) else None


def check_options(options: str) -> None:
    """Raise `UserError` unless ``options`` are keyword arguments as JSON."""
    try:
        value = json.loads(options)
    except json.JSONDecodeError as error:
        raise UserError(f"--strategy-options {options!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(
            f"--strategy-options {options!r} is not a JSON object",
            "Write the keyword arguments as '{\"name\": value}'.",
        )
