"""How the commands read what is typed, and the options that several of them have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from spartito.errors import UserError
from spartito.names import RECIPES, STRATEGIES


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


Target = Annotated[str, typer.Argument(help=f"Your script, or one of {', '.join(RECIPES)}.")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS...", help="Options of the script or recipe."),
]
Strategy = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(STRATEGIES)}.", metavar="NAME")
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
