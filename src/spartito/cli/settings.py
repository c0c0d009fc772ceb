"""What one would type every time: ``spartito.toml``, or ``[tool.spartito]`` of a pyproject.toml.

    [run]
    strategy = "mirrored"
    workers = 2

Each table is a command, each key an option of it. What is typed wins, then the environment, then
the file. It is looked for in the folder of the script (for recipes the present one) and in those
above, up to the root of the repository or the user's home.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from spartito.cli.commands import COMMANDS
from spartito.errors import UserError
from spartito.names import (
    ENV_INTERFACE,
    ENV_MIXED,
    ENV_NOTICE,
    ENV_PORTS,
    ENV_RECOVERY,
    ENV_RUN_DIR,
    ENV_SHARE_DEVICES,
    ENV_STRATEGY,
    ENV_STRATEGY_OPTIONS,
    ENV_TLS,
    nearest,
)
from spartito.notes import say

OWN, PROJECT = "spartito.toml", "pyproject.toml"
OF_STRATEGY = (ENV_STRATEGY, ENV_STRATEGY_OPTIONS)
VARIABLES: Mapping[str, tuple[str, ...]] = {
    "strategy": OF_STRATEGY,
    "strategy_options": OF_STRATEGY,
    "mesh": OF_STRATEGY,
    "stages": OF_STRATEGY,
    "microbatches": OF_STRATEGY,
    "ports": (ENV_PORTS,),
    "interface": (ENV_INTERFACE,),
    "insecure": (ENV_TLS,),
    "notice": (ENV_NOTICE,),
    "share_devices": (ENV_SHARE_DEVICES,),
    "mixed": (ENV_MIXED,),
    "recover": (ENV_RECOVERY,),
    "min_workers": (ENV_RECOVERY,),
    "wait": (ENV_RECOVERY,),
}
"""The variables that say the same as an option, and win over a file."""
OF_TRAIN: Mapping[str, tuple[str, ...]] = {"out": (ENV_RUN_DIR,)}

Table = Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """What a file says for one command.

    Args:
        file: Which it is.
        values: What it says, by the names of parameters.
        flags: The same options as they are typed, by these names.
    """

    file: Path | None = None
    values: Table = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)

    def without(self, names: Container[str]) -> Self:
        """The same without the options ``names``, which were typed."""
        return replace(self, flags={n: f for n, f in self.flags.items() if n not in names})

    def say(self) -> None:
        """Print which file was used, and for what; nothing where none was."""
        if self.flags:
            words = [
                word
                for name, flag in self.flags.items()
                for word in _typed(flag, self.values[name])
            ]
            say(f"{self.file}: {' '.join(words)}")

    @contextmanager
    def named(self) -> Iterator[None]:
        """Have a user's mistake say which of the options that it names the file gave."""
        try:
            yield
        except UserError as error:
            named = [
                flag for flag in self.flags.values() if re.search(rf"{flag}(?![\w-])", str(error))
            ]
            if named:
                error.args = (
                    f"{error}\n  {' '.join(named)} {'is' if len(named) == 1 else 'are'} from "
                    f"{self.file}; --no-config leaves it out.",
                )
            raise


def settings_of(command: Any, path: Sequence[str], program: str | None) -> Settings:
    """What the nearest file says for a command.

    Args:
        command: Whose options they are.
        path: Its name, as ``("cluster", "compose")``.
        program: The script, the module or the recipe that was typed.

    Returns:
        Them; none where there is no file.

    Raises:
        UserError: The file cannot be read, or has a key or a value that cannot be.
    """
    start = _start(program)
    found = None if start is None else find(start)
    if found is None:
        return Settings()
    file, tables = found
    for name in tables:
        if name not in COMMANDS:
            raise UserError(
                f"{file}: {name!r} is not a command of spartito", nearest(name, COMMANDS)
            )
    where = f"[{'.'.join(path)}]"
    for part in path:
        tables = tables.get(part, {})
        if not isinstance(tables, dict):
            raise UserError(f"{file}: {part!r} is not a table", f"Write {where}, and its options.")
    options = _options(command)
    values = {}
    for key, value in tables.items():
        name = key.replace("_", "-")
        if name not in options:
            raise UserError(f"{file}: {where} has no option {key!r}", nearest(name, options))
        values[options[name].name] = _value(options[name], f"{file}: {where} {key}", value)
    variables = {**VARIABLES, **(OF_TRAIN if where == "[train]" else {})}
    used = {
        name: value
        for name, value in values.items()
        if not any(os.environ.get(variable) for variable in variables.get(name, ()))
    }
    flags = {one.name: f"--{name}" for name, one in options.items() if one.name in used}
    return Settings(file, used, flags)


def find(start: Path) -> tuple[Path, Table] | None:
    """The nearest file with settings, and all that it says.

    Args:
        start: The folder where to begin.

    Returns:
        The file, and its tables by command; None where there is none.

    Raises:
        UserError: It cannot be read, or a folder has two.
    """
    home = _home()
    for folder in (start, *start.parents):
        tables = {path: _tables(path) for path in (folder / OWN, folder / PROJECT)}
        found = [(path, table) for path, table in tables.items() if table is not None]
        if len(found) > 1:
            raise UserError(
                f"{folder} has settings in {OWN} and in {PROJECT}", "Keep them in one of the two."
            )
        if found:
            return found[0]
        if folder == home or (folder / ".git").exists():
            return None
    return None


def _start(program: str | None) -> Path | None:
    """Where to look for the file: beside the script, if that is what ``program`` is."""
    if program is not None and Path(program).is_file():
        return Path(program).resolve().parent
    try:
        return Path.cwd()
    except OSError:  # the folder was removed
        return None


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # a user of a container, who has none
        return None


def _tables(path: Path) -> Table | None:
    """What a file says; None where there is none, or nothing for us."""
    try:
        with path.open("rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            text = file.read().decode()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}", "Write it anew, as UTF-8.") from error
    if path.name == PROJECT and "spartito" not in text:
        return None
    # Who may write it says what is started here: a command for ssh, an interpreter.
    if owner not in (0, os.getuid()):
        said = f"note: {path} belongs to another user (number {owner}), and is not read"
        say(said)
        return None
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"{path}: {error}", 'Write it as: [run], and in a line below: strategy = "mirrored"'
        ) from error
    tables = read if path.name == OWN else read.get("tool", {}).get("spartito")
    return tables if isinstance(tables, dict) else None


def _options(command: Any) -> dict[str, Any]:
    """What a file may say for a command, by the names of the options without their dashes."""
    return {
        flag.removeprefix("--"): one
        for one in command.params
        if one.param_type_name == "option" and one.expose_value
        for flag in one.opts
        if flag.startswith("--")
    }


def _value(option: Any, where: str, value: Any) -> Any:
    """A value of the file as the option takes it; `UserError` where it is of another type."""
    flag = option.opts[-1]
    if option.is_flag:
        if not isinstance(value, bool):
            raise UserError(f"{where} = {value!r} is not true or false", f"{flag} takes no value.")
        return value
    several = value if isinstance(value, list) and option.multiple else [value]
    for one in several:
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            raise UserError(
                f"{where} = {one!r} is not what {flag} takes",
                f"As it is typed: {flag} {option.metavar}.",
            )
    return [str(one) for one in several] if option.multiple else str(value)


def _typed(flag: str, value: Any) -> list[str]:
    """An option as one types it."""
    if isinstance(value, bool):
        return [flag] if value else []
    return [f"{flag}={one}" for one in (value if isinstance(value, list) else [value])]
