"""How the commands read what is typed."""

from __future__ import annotations

from collections.abc import Callable

from spartito.errors import UserError


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
