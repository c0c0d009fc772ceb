"""Talking to the job's store, whose calls know no time limit when its keeper is frozen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed import Store

from spartito.errors import TaskLostError

T = TypeVar("T")

MARGIN = 3.0  # seconds beyond a limit in which a call that keeps one itself may still answer


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
        except BaseException as error:  # raised again below, in the thread that asked
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


def absentees(store: Store, rank: int, names: Sequence[str], limit: float) -> list[str]:
    """Sign in as ``rank`` and answer the names of those who do not within ``limit`` seconds.

    Rank 0 keeps the store: it is absent too if the store is gone or frozen from the start.
    """
    absent = set(range(len(names)))
    end = time.monotonic() + limit

    def look() -> None:
        nonlocal absent
        store.set(str(rank), "")
        while absent := {other for other in absent if not store.check([str(other)])}:
            if time.monotonic() > end:
                return
            time.sleep(0.005)

    try:
        ask(look, limit, names[0])
    except TaskLostError:
        # Often the store went with rank 0 just because somebody else did not come in time.
        if len(absent) == len(names):
            absent = {0}
    return [names[rank] for rank in sorted(absent)]
