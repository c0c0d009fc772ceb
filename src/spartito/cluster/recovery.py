"""What the tasks that live do when one is lost: wait for its replacement, or go on without it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from spartito.cluster.limits import time_limit
from spartito.errors import UserError
from spartito.names import ENV_RECOVERY
from spartito.numeric import is_whole

WITHOUT_IT, ALL = 30.0, 300.0
"""Seconds for a replacement, unless told otherwise: where others may go on without it, and where
all have to be there, so that nothing is won by an earlier end."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a training goes on when a task of it is lost.

    Args:
        min_workers: go on with so many tasks that train when no replacement came; None: all must
            be there again.
        wait: seconds for a replacement; None: 30 where others may go on without it, else 300.

    Raises:
        UserError: values that cannot be.
    """

    min_workers: int | None = None
    wait: float | None = None

    def __post_init__(self) -> None:
        least = self.min_workers
        if least is not None and not is_whole(least):
            raise UserError(f"min_workers={least!r} is not a whole number")
        if least is not None and least < 1:
            raise UserError(f"min_workers={least}", "Somebody has to go on: 1 or more.")
        if self.wait is not None:
            object.__setattr__(self, "wait", time_limit(self.wait, what="wait"))

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Self | None:
        """What ``SPARTITO_RECOVERY`` says, as ``min_workers=1,wait=30``.

        Args:
            env: the environment.

        Returns:
            It; None where the variable is not set: a lost task then ends the training.

        Raises:
            UserError: the text says something else.
        """
        text = env.get(ENV_RECOVERY)
        if not text:
            return None
        given: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                given[name] = {"min_workers": int, "wait": float}[name](value)
            except (KeyError, ValueError):
                raise UserError(
                    f"{ENV_RECOVERY}={text!r}: {part!r} is not min_workers=N or wait=SECONDS",
                    "Write it as min_workers=1,wait=30; both may be left out.",
                ) from None
        return cls(**given)  # type: ignore[arg-type]

    @property
    def patience(self) -> float:
        """Seconds for a replacement."""
        if self.wait is not None:
            return self.wait
        return ALL if self.min_workers is None else WITHOUT_IT

    @property
    def text(self) -> str:
        """What `from_environment` reads as this value."""
        least = () if self.min_workers is None else (f"min_workers={self.min_workers}",)
        return ",".join([*least, f"wait={self.patience:g}"])
