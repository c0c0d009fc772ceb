"""How the commands read what is typed, and the options that several of them have."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import typer

from spartito.cluster.endpoints import parse_range
from spartito.errors import UserError
from spartito.names import ENV_INTERFACE, ENV_PORTS, RECIPES
from spartito.registry import strategy_names


def whole(option: str, least: int | None = None) -> Callable[[str], int]:
    """Reads the whole number of ``option``; its error names what came."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise UserError(f"{option} {text} is not a whole number") from None
        if least is not None and number < least:
            raise UserError(f"{option} {number} is less than {least}")
        return number

    return read


def network(ports: str | None, interface: str | None) -> dict[str, str]:
    """This process's environment, and there what the options `Ports` and `Interface` say."""
    if ports is not None:
        parse_range(ports, "--ports")
    told = {ENV_PORTS: ports, ENV_INTERFACE: interface}
    return {**os.environ, **{name: value for name, value in told.items() if value is not None}}


Ports = Annotated[
    str | None,
    typer.Option(
        help="The ports at which tasks may listen, as 29500-29510; by default those of the "
        "cluster, else what the system draws.",
        metavar="A-B",
    ),
]
Interface = Annotated[
    str | None,
    typer.Option(
        help="The network interface at which tasks listen, as eth1, or its address.",
        metavar="NAME",
    ),
]
Target = Annotated[str, typer.Argument(help=f"Your script, or one of {', '.join(RECIPES)}.")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS...", help="Options of the script or recipe."),
]
Strategy = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(strategy_names())}.", metavar="NAME")
]
StrategyOptions = Annotated[
    str | None,
    typer.Option(help="The strategy's keyword arguments, a JSON object.", metavar="JSON"),
]
Chief = Annotated[
    bool,
    typer.Option(
        "--chief",
        help="With --ps: a task of its own that hands out the work, not worker 0.",
    ),
]
Evaluator = Annotated[
    bool,
    typer.Option("--evaluator", help="A task of its own that evaluates each checkpoint."),
]
