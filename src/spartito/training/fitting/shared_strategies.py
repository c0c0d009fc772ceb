"""Several trainers on one strategy: each speaks of its own model."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from spartito.training.callback import Training

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=Training)


def with_its_pair(
    purpose: str = "",
) -> Callable[[Callable[Concatenate[T, P], R]], Callable[Concatenate[T, P], R]]:
    """Makes a trainer's method be about its own model, whatever else its strategy has prepared.

    Its calls to other tasks are for ``purpose``, which errors name.
    """

    def decorate(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
        @wraps(method)
        def wrapped(self: T, /, *args: P.args, **options: P.kwargs) -> R:
            with self.coordination.during(purpose, self.optimizer):
                return method(self, *args, **options)

        return wrapped

    return decorate
