"""How long a task waits for another one, and what follows from that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from spartito.errors import UserError
from spartito.names import ENV_NOTICE, ENV_TIMEOUT
from spartito.numeric import is_number

MOST_SECONDS = 2_000_000
"""Three weeks: a socket's own limit is 2**31 milliseconds."""
NOTICE = 5.0
"""Seconds after which a task that stands still is named, where the limit leaves time for it."""


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


def notice_limit(given: float | None = None, env: Mapping[str, str] = os.environ) -> float:
    """Seconds after which a launcher names a task that stands still.

    Args:
        given: What was asked for.
        env: Has ``SPARTITO_NOTICE``; without it they are 5, and at most half of the time limit, so
            that the task is named before the others give it up.

    Raises:
        UserError: A variable is no such number.
    """
    asked = env.get(ENV_NOTICE) if given is None else given
    return min(NOTICE, time_limit(env=env) / 2) if asked is None else seconds_of(asked, ENV_NOTICE)


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
    if not is_number(seconds) or not 0 < seconds <= MOST_SECONDS:
        raise UserError(f"{source} is not a number of seconds above 0 and up to {MOST_SECONDS:,}")
    return float(seconds)
