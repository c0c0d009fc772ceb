"""The options of the commands, made from the fields of a job and of its launchers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from spartito.errors import UserError
from spartito.launch.job import Heading, JobSpec, Option
from spartito.names import RECIPES

F = TypeVar("F", bound=Callable[..., None])

Target = Annotated[
    str,
    typer.Argument(metavar="SCRIPT|RECIPE", help=f"Your script, or one of {', '.join(RECIPES)}."),
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="-- ARGS...", help="Options of the script or recipe.")
]


def whole(option: str, least: int | None = None) -> Callable[[str], int]:
    """Reads the whole number of ``option``; its error names what came."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            likely = max(2, least or 0)
            raise UserError(
                f"{option} {text} is not a whole number", f"As {option} {likely}."
            ) from None
        if least is not None and number < least:
            raise UserError(f"{option} {number} is less than {least}", f"Give {least} or more.")
        return number

    return read


def real(option: str, above: bool = False) -> Callable[[str], float]:
    """Reads the number of ``option``, 0 or more (or ``above`` it); as `whole`."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (found > 0 if above else found >= 0) or math.isinf(found):
            rule = "more than 0" if above else "0 or more"
            raise UserError(f"{option} {text} is not a number, {rule}", f"As {option} 1.")
        return found

    return read


def value(
    help: str,
    metavar: str,
    heading: Heading | None = None,
    parser: Callable[[str], Any] | None = None,
) -> Any:
    """What the command line says of an option that is a word, or what ``parser`` reads from it."""
    return typer.Option(help=help, metavar=metavar, rich_help_panel=heading, parser=parser)


def number(option: str, help: str, least: int | None = None, heading: Heading | None = None) -> Any:
    """What the command line says of an option that is a whole number."""
    return typer.Option(
        option, help=help, parser=whole(option, least), metavar="N", rich_help_panel=heading
    )


def switch(option: str, help: str, heading: Heading | None = None) -> Any:
    """What the command line says of an option that is there or not."""
    return typer.Option(option, help=help, rich_help_panel=heading)


RecipeData = Annotated[
    str | None, value("The folder with a recipe's data, or its URL.", "DIR", Heading.TRAINING)
]
Json = Annotated[bool, switch("--json", "Print one last line of JSON.")]


def with_options(
    *kinds: type, first: Sequence[str] = (), without: Collection[str] = ()
) -> Callable[[F], F]:
    """Give a command the options that the fields of ``kinds`` are, but those ``without``.

    The command takes them as ``**given``, its last parameter. Its help begins with those that are
    named ``first``, its own among them; the others stand under their headings.
    """

    def decorate(command: F) -> F:
        own = inspect.signature(command, eval_str=True).parameters.values()
        named = [one for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD]
        taken = {*without, *(one.name for one in named)}
        more: dict[str, inspect.Parameter] = {}
        for kind in kinds:
            hints = get_type_hints(kind)
            for one in _options(kind):
                if one.name not in taken:
                    heading = None if one.name in first else _heading(one, kind)
                    more.setdefault(one.name, _parameter(one, hints[one.name], heading))
        keyword = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in named]
        found = {**{one.name: one for one in keyword}, **more}
        order = [*first, *(name for name in found if name not in first)]
        signature = inspect.Signature([found[name] for name in order])
        command.__signature__ = signature  # type: ignore[attr-defined]
        return command

    return decorate


def taken_from(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``given`` belongs to the fields of ``kind``, as its constructor takes it."""
    found = {one.name: given.get(one.name) for one in _options(kind)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found.items()
        if value is not None
    }


def typed(kind: type, given: Mapping[str, Any], beside: type | None = None) -> list[str]:
    """The options of ``kind`` that are given, without those that ``beside`` has too."""
    shared = {one.name for one in _options(beside)} if beside else set()
    return [
        flag_of(one)
        for one in _options(kind)
        if one.name not in shared and given.get(one.name) not in (one.default, [], None)
    ]


def words_of(kinds: Iterable[type], given: Mapping[str, Any]) -> list[str]:
    """The words by which ``given`` would be typed again, as far as it belongs to ``kinds``."""
    words: list[str] = []
    for one in (one for kind in kinds for one in _options(kind)):
        value = given.get(one.name)
        if value in (one.default, [], None):
            continue
        flag = flag_of(one)
        values = value if isinstance(value, list | tuple) else [value]
        words += [flag] if value is True else [f"{flag}={each}" for each in values]
    return words


def job_of(program: Any, given: Mapping[str, Any]) -> JobSpec:
    """The job that the options ``given`` ask for."""
    return JobSpec(program=program, **taken_from(JobSpec, given))


def flag_of(one: Field[Any]) -> str:
    """The option that a field is."""
    said: Option = one.metadata["option"]
    return said.flag or f"--{one.name.replace('_', '-')}"


def _options(kind: type) -> Iterator[Field[Any]]:
    return (one for one in fields(kind) if "option" in one.metadata)


def _heading(one: Field[Any], kind: type) -> str:
    said: Option = one.metadata["option"]
    return said.heading or kind.__name__


def _parameter(one: Field[Any], hint: Any, heading: str | None) -> inspect.Parameter:
    said: Option = one.metadata["option"]
    flag = flag_of(one)
    how: dict[str, Any] = {"help": said.help, "metavar": said.metavar, "rich_help_panel": heading}
    plain = next((arg for arg in get_args(hint) if arg is not NoneType), hint)
    if plain is int:
        how |= {"parser": whole(flag, said.least), "metavar": "N"}
    elif plain is float:
        how |= {"parser": real(flag, above=True)}
    default = None if one.default is MISSING else one.default
    if get_origin(hint) is tuple:
        hint, default = list[str] | None, None
    elif default is None and not isinstance(hint, UnionType):
        hint = hint | None
    annotation = Annotated[hint, typer.Option(flag, **how)]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(one.name, kind, default=default, annotation=annotation)
