"""Several trainers on one strategy: each speaks of its own model."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from spartito.training.callback import Training

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=Training)


def with_its_pair(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """``method`` of a trainer, about its own model, whatever else its strategy has prepared."""

    @wraps(method)
    def wrapped(self: T, /, *args: P.args, **options: P.kwargs) -> R:
        with self.strategy.using(self.optimizer):
            return method(self, *args, **options)

    return wrapped
