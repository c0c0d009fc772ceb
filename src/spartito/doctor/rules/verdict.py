"""What a verdict is, and what a set of them comes to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from spartito.errors import EXIT_TASK_LOST

Grade = Literal["missing", "wrong", "warning", "note"]
"""A task is not there; training fails or hangs; it runs, but badly; good to know."""


class Verdict(msgspec.Struct, frozen=True):
    """What is so, for which tasks, and what to do about it."""

    kind: str
    grade: Grade
    what: str
    do: str = ""
    tasks: list[str] = []


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """69 when a task is not there, 1 when something is wrong, else 0."""
    grades = {verdict.grade for verdict in verdicts}
    if "missing" in grades:
        return EXIT_TASK_LOST
    return int("wrong" in grades)
