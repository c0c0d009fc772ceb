"""The command ``spartito strategies``: all of them, or the options of one."""

from __future__ import annotations

import inspect
import json as json_
import re
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from textwrap import wrap
from typing import Annotated, Any

import typer

from spartito.cli.options import Json
from spartito.declared import parse
from spartito.errors import UserError
from spartito.names import aligned
from spartito.registry import StrategyInfo, strategy_info, strategy_names

ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n(?:     .*|\s*)$)*)", re.MULTILINE)
SENTENCE = re.compile(r"(?<!al)[.;] (?=[A-Z])|: \*")
LONGEST, INDENT = 24, 34
HEADS = ("strategy", "what it does", "needs")


def strategies(
    strategy: Annotated[
        str | None,
        typer.Argument(metavar="STRATEGY", help="One of them, to list its options."),
    ] = None,
    json: Json = False,
) -> None:
    """List the strategies, or the options of one.

    Example: spartito strategies local_sgd
    """
    if strategy is None:
        records = [_known(each) for each in strategy_names()]
        print(json_.dumps(records) if json else table(records))
        return
    info = strategy_info(parse(strategy, "strategy").name)
    options = list(options_of(info))
    if json:
        said = {option: {"default": default, "about": about} for option, default, about in options}
        print(json_.dumps({**record(info), "options": said}))
        return
    width = get_terminal_size().columns
    rows = [(f"{option}={default}", about) for option, default, about in options]
    print("\n".join([f"{info.name}: {info.about}", f"needs: {_needs(info.needs)}", ""]))
    print("\n".join(line for row in rows for line in _explained(*row, width)))
    print(f"\nThey stand behind the name, as --strategy '{info.name}(timeout=60)'.")


def record(info: StrategyInfo) -> dict[str, Any]:
    """A strategy of the table, as JSON."""
    return {"name": info.name, "about": info.about, "needs": list(info.needs)}


def _known(name: str) -> dict[str, Any]:
    """The record of a strategy; of one whose package is broken, what is wrong with it."""
    try:
        return record(strategy_info(name))
    except UserError as error:
        return {"name": name, "about": str(error).partition("\n")[0], "needs": ["a repair"]}


def table(records: Sequence[dict[str, Any]]) -> str:
    """All strategies as a person reads them."""
    rows = [HEADS, *((each["name"], each["about"], _needs(each["needs"])) for each in records)]
    more = "spartito strategies NAME lists the options of one."
    return "\n".join([*aligned(rows), "", more])


def options_of(info: StrategyInfo) -> Iterator[tuple[str, str, str]]:
    """The options of a strategy: the name, the default, and the first sentence on it.

    Args:
        info: What is known of it; its class is imported.

    Yields:
        Those of its own first, then those that all strategies have.
    """
    kind = info.load()
    about: dict[str, str] = {}
    for base in inspect.getmro(kind)[:-1]:
        for name, words in ARGUMENT.findall(inspect.cleandoc(base.__doc__ or "")):
            about.setdefault(name, SENTENCE.split(" ".join(words.replace("`", "").split()))[0])
    parameters = inspect.signature(kind).parameters
    names = (
        [name for name in parameters if name != "cluster"] if info.options is None else info.options
    )
    for name in names:
        default = parameters[name].default
        shown = "" if default is inspect.Parameter.empty else repr(default)
        yield name, shown if len(shown) <= LONGEST else "...", about.get(name, "").rstrip(".")


def _explained(name: str, about: str, width: int) -> list[str]:
    """An option and what it is, in lines."""
    lines = wrap(about, max(40, min(width, 100)) - INDENT)
    first = f"  {name}".ljust(INDENT)
    if len(first) > INDENT:
        return [first, *(" " * INDENT + line for line in lines)]
    return [first + lines[0], *(" " * INDENT + line for line in lines[1:])] if lines else [first]


def _needs(needs: Sequence[str]) -> str:
    return ", ".join(needs) or "nothing more"
