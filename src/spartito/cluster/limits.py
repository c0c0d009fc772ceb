"""How long a task waits for another one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from spartito.errors import UserError
from spartito.names import ENV_TIMEOUT

MOST_SECONDS = 2_000_000
"""Three weeks: a socket's own limit is 2**31 milliseconds."""


def time_limit(
    given: float | None = None, env: Mapping[str, str] = os.environ, what: str = "timeout"
) -> float:
    """Seconds that a wait for another task may take: ``given``, ``SPARTITO_TIMEOUT``, or 300.

    Raises `UserError`, which names it as ``what``, where that is no such number: options come from
    JSON, where anything may stand.
    """
    if given is not None:
        return _checked(given, f"{what}={given!r}")
    return seconds_of(env.get(ENV_TIMEOUT, "300"), ENV_TIMEOUT)


def seconds_of(given: float | str, name: str) -> float:
    """The seconds that a variable or an option says.

    Args:
        given: A number, or its text.
        name: Of the variable.

    Raises:
        UserError: It is no such number.
    """
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    return _checked(seconds, f"{name}={given!r}")


def _checked(seconds: Any, source: str) -> float:
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 < seconds <= MOST_SECONDS:
        raise UserError(f"{source} is not a number of seconds above 0 and up to {MOST_SECONDS:,}")
    return float(seconds)
