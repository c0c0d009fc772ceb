"""Where a task is in a training that goes on when a task is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spartito.training.callback import Callback
from spartito.training.callbacks.csv_logger import CSVLogger

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


def missed(
    callbacks: Sequence[Callback], keys: Sequence[int], after: int, until: int
) -> list[Callback]:
    """Those between two keys that have to be called: who keeps a state has the others' now.

    That of `CSVLogger` is how long the file is.
    """
    return [
        callback
        for callback, key in zip(callbacks, keys, strict=True)
        if after < key < until and (isinstance(callback, CSVLogger) or not callback.state_dict())
    ]
