"""Talking to the job's store, whose calls know no time limit when its keeper is frozen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from spartito.errors import TaskLostError

T = TypeVar("T")

MARGIN = 3.0  # seconds beyond a limit in which a call that has its own may name who is missing


def ask(call: Callable[[], T], limit: float, keeper: str) -> T:
    """What ``call`` answers, which talks to the store that the task ``keeper`` holds.

    Raises `TaskLostError` that names the keeper when the store is gone, or has not answered
    ``limit`` seconds (and a margin) later: the call goes on in its thread, and nobody waits.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # it goes on its way below, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=work, name="spartito-store", daemon=True)
    thread.start()
    thread.join(limit + MARGIN)
    if answers:
        return answers[0]
    error = errors[0] if errors else None
    if error is not None and not isinstance(error, RuntimeError):
        raise error
    what = "is gone" if error is not None else f"did not answer within {limit:g} s"
    raise TaskLostError(
        f"{keeper} {what}: it keeps the store where the tasks meet",
        f"Look at the last lines of {keeper}. SPARTITO_TIMEOUT sets the limit in seconds.",
    ) from error
