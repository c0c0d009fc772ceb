"""Where a task is in a training that goes on when a task is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TRAIN, CONCLUDE, CALLBACKS, AGREE, END = range(5)
"""The stages of an epoch: its steps, its figures, its callbacks, whether another one comes."""

ALL = 1 << 30
"""Every callback was called."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the last update left a task."""

    data: dict[str, Any]
    seen: tuple[Any, ...]
    done: int
    examples: int
