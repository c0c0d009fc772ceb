"""What a verdict is, and what a set of them comes to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from spartito.errors import EXIT_TASK_LOST

Severity = Literal["missing", "error", "warning", "note"]
"""A task is not there; training fails or hangs; it runs, but badly; good to know."""


class Verdict(msgspec.Struct, frozen=True):
    """What is so, for which tasks, and what to do about it."""

    kind: str
    severity: Severity
    message: str
    advice: str = ""
    tasks: list[str] = []


Verdicts = Iterator[Verdict]


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """69 when a task is not there, 1 when something is wrong, else 0."""
    severities = {verdict.severity for verdict in verdicts}
    if "missing" in severities:
        return EXIT_TASK_LOST
    return int("error" in severities)
