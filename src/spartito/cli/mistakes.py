"""What was typed and cannot be, in our words: what came, the rule, and what to type."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from spartito.errors import UserError
from spartito.names import RECIPES, nearest

CLOSE = 0.7
"""How alike two options are of which one may be a slip for the other."""


def unknown_command(path: str, name: str, known: list[str]) -> UserError:
    """What to say about a command that is not there.

    Args:
        path: What was typed before it, as ``spartito data``.
        name: The word.
        known: The commands that there are.

    Returns:
        The mistake.
    """
    hint = nearest(name, known)
    if path == "spartito" and name in RECIPES:
        hint = f"It is a recipe: spartito train {name}"
    elif path == "spartito" and (name.endswith(".py") or Path(name).is_file()):
        hint = f"To run a script: spartito run {name}"
    return UserError(f"{path} has no command {name!r}", hint)


def as_mistake(error: Any) -> UserError:
    """What the parser says, as a mistake of ours.

    Args:
        error: What it raised.

    Returns:
        The mistake.
    """
    context, option = error.ctx, getattr(error, "option_name", None)
    path = context.command_path if context is not None else "spartito"
    more = f"{path} --help says what there is."
    if option is not None and hasattr(error, "possibilities"):
        return UserError(f"{path} has no option {option}", _instead(context, option))
    if option is not None:
        return UserError(f"{option} needs a value", f"Write it behind: {option} VALUE")
    if type(error).__name__ == "MissingParameter" and error.param is not None:
        name = error.param.metavar or error.param.name.upper()
        example = (getattr(context.command, "epilog", "") or more).partition("\n")[0]
        return UserError(f"{path}: {name} is missing", example)
    message = error.format_message()
    if extra := re.search(r"extra argument.*\((.*)\)", message):
        return UserError(f"{path} takes no further words, but got: {extra[1]}", more)
    return UserError(f"{path}: {message[:1].lower()}{message[1:].rstrip('.')}", more)


def _instead(context: Any, option: str) -> str:
    """What to type instead of an option that the command lacks."""
    path = context.command_path
    known = [flag for one in context.command.params for flag in one.opts if flag.startswith("--")]
    if close := get_close_matches(option, known, n=1, cutoff=CLOSE):
        return f"Did you mean {close[0]}? {path} --help lists all."
    if path == "spartito run":
        return f"An option of the script's own stands behind it: spartito run SCRIPT {option} ..."
    if path == "spartito":
        return "Options stand behind a command, as spartito run --strategy mirrored train.py."
    return f"{path} --help lists all."
