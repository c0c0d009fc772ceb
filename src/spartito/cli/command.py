"""What every command of ``spartito`` does: its help has headings, its settings may be in a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from spartito.cli.commands import COMMANDS
from spartito.cli.mistakes import unknown_command
from spartito.cli.options import switch
from spartito.cli.settings import Settings, settings_of
from spartito.launch.job import Heading

SETTINGS = "spartito.settings"
ARGUMENTS, OPTIONS = "Arguments", "Options"
PAGE = 'More: the page "Command line" of the documentation.'
EXAMPLE = re.compile(r"^Example: .*(?:\n(?!\n).*)*", re.MULTILINE)


class Command(TyperCommand):
    """A command whose first options stand alone, the others under the `Heading` of each.

    An option says by ``rich_help_panel`` where it belongs; those that say nothing come first.
    Of the docstring, examples stand at the end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `TyperCommand`, with ``--no-config``."""
        super().__init__(*args, **kwargs)
        self.help, self.epilog = _apart(self.help or "")
        self.params.append(_no_config())

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As `TyperCommand.parse_args`, with what a file says by default."""
        typed, _, _ = self.make_parser(ctx).parse_args(list(args))
        settings = Settings()
        if not typed.get("no_config"):
            program = typed.get("script") or typed.get("target")
            path = ctx.command_path.split()[1:]
            settings = settings_of(self, path, program if isinstance(program, str) else None)
        ctx.default_map = dict(settings.values)
        with settings.named():
            left = super().parse_args(ctx, args)
        ctx.meta[SETTINGS] = settings.without(typed)
        return left

    def invoke(self, ctx: Any) -> Any:
        """As `TyperCommand.invoke`; what a file said is told first, and where it was wrong."""
        settings: Settings = ctx.meta[SETTINGS]
        settings.say()
        with settings.named():
            return super().invoke(ctx)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write how it is typed: ``spartito run [OPTIONS] SCRIPT [ARGS...]``."""
        arguments = [_shown(one) for one in self.params if is_argument(one)]
        formatter.write_usage(ctx.command_path, " ".join(["[OPTIONS]", *arguments]))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write what it takes, a section for each heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for heading, row in _rows(self, ctx):
            sections.setdefault(heading, []).append(row)
        for heading in sorted(sections, key=_position):
            with formatter.section(heading):
                formatter.write_dl(sections[heading])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they are typed: not wrapped."""
        formatter.write(f"\n{self.epilog}\n" if self.epilog else "")
        formatter.write(f"\n{PAGE}\n")


class Group(TyperGroup):
    """A command of commands, with its example at the end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `TyperGroup`."""
        super().__init__(*args, **kwargs)
        self.help, self.epilog = _apart(self.help or "")

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands as they are to be read: Spartito's own in the order of `COMMANDS`."""
        is_whole = set(self.commands) <= set(COMMANDS)
        return (
            [name for name in COMMANDS if name in self.commands] if is_whole else [*self.commands]
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As `TyperGroup.resolve_command`, with what to type instead of a wrong word."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise unknown_command(ctx.command_path, args[0], [*self.commands])
        return super().resolve_command(ctx, args)

    format_epilog = Command.format_epilog


def _apart(help: str) -> tuple[str, str]:
    """What a help says, and its examples."""
    examples = [" ".join(one.split()) for one in EXAMPLE.findall(help)]
    return EXAMPLE.sub("", help).strip(), "\n".join(examples)


def is_argument(parameter: Any) -> bool:
    """Whether a parameter of a command is an argument, and no option."""
    return bool(parameter.param_type_name == "argument")


def _shown(argument: Any) -> str:
    """An argument as the usage says it."""
    name = _name(argument)
    return name if argument.required else f"[{name}]"


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _rows(command: Command, ctx: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    """The heading of each argument and option, and what is written of it."""
    parameters: list[Any] = command.get_params(ctx)
    for one in parameters:
        if is_argument(one):
            yield ARGUMENTS, (_name(one), one.help or "")
        elif (row := one.get_help_record(ctx)) is not None:
            yield getattr(one, "rich_help_panel", None) or OPTIONS, row


def _position(heading: str) -> int:
    """Where a heading stands: those of launchers, which are not in the list, before it."""
    first = [ARGUMENTS, OPTIONS]
    known = [*first, *Heading]
    return known.index(heading) if heading in known else len(first)


def _declaration(
    no_config: Annotated[
        bool,
        switch("--no-config", "Read no spartito.toml and no pyproject.toml.", Heading.ADVANCED),
    ] = False,
) -> None:
    """The option that every command has."""


@cache
def _no_config() -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(_declaration)
    option: Any = typer.main.get_command(app).params[0]
    option.expose_value = False
    return option
