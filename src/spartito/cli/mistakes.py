"""What was typed and cannot be, in our words: what came, the rule, and what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spartito.cli.commands import COMMANDS
from spartito.errors import UserError
from spartito.names import RECIPES, nearest


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
        return UserError(f"{option} of {path} needs a value", more)
    if type(error).__name__ == "MissingParameter" and error.param is not None:
        name = error.param.metavar or error.param.name.upper()
        example = (getattr(context.command, "epilog", "") or more).partition("\n")[0]
        return UserError(f"{path}: {name} is missing", example)
    return UserError(f"{path}: {_lower(error.format_message())}", more)


def _instead(context: Any, option: str) -> str:
    """What to type instead of an option that the command lacks."""
    known = {flag for one in context.command.params for flag in one.opts if flag.startswith("--")}
    hint = nearest(option, known)
    if context.command_path == "spartito run" and "Did you mean" not in hint:
        return f"If it is the script's own, write it behind it: spartito run SCRIPT {option} ..."
    if context.command_path == "spartito" and option not in known:
        return (
            f"Options stand behind the command: spartito run {option} ... ({', '.join(COMMANDS)})"
        )
    return hint


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:].rstrip(".")
