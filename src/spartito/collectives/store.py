"""Talking to the job's store, whose calls know no time limit when its keeper is frozen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed import Store

from spartito.collectives.waiting import Waiting
from spartito.errors import (
    EXIT_TASK_LOST,
    MismatchedCallsError,
    SpartitoError,
    TaskLostError,
)

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


def missing_tasks(
    store: Store, rank: int, names: Sequence[str], limit: float, keeper: str = ""
) -> list[str]:
    """Sign in as ``rank`` and answer the names of those who do not within ``limit`` seconds.

    ``keeper`` keeps the store, rank 0 if nothing is said: it is absent too if the store is gone
    or frozen from the start. A wait for the others is told.
    """
    return sign_in(store, rank, names, limit, keeper=keeper, waiting=Waiting(rank, names))[0]


def sign_in(
    store: Store,
    rank: int,
    names: Sequence[str],
    limit: float,
    text: str = "",
    keeper: str = "",
    waiting: Waiting | None = None,
) -> tuple[list[str], list[str]]:
    """As `missing_tasks`, and the texts of those who came; ``text`` is ours, "" is none.

    ``waiting`` takes note of a wait for the others.
    """
    absent = set(range(len(names)))
    words: dict[int, str] = {}
    start = time.monotonic()
    end = start + limit

    def look() -> None:
        store.set(str(rank), text)
        while True:
            for other in sorted(absent):
                if store.check([str(other)]):
                    words[other] = store.get(str(other)).decode()
                    absent.discard(other)
            if not absent or time.monotonic() > end:
                return
            if waiting is not None:
                waiting.look(time.monotonic() - start, absent, limit)
            time.sleep(0.005)

    keeper = keeper or names[0]
    try:
        ask(look, limit, keeper)
    except TaskLostError:
        # Often the store went with its keeper just because somebody else did not come in time.
        if not words:
            return [keeper], []
    return [names[rank] for rank in sorted(absent)], [words[r] for r in sorted(words) if words[r]]


def told(error: SpartitoError) -> str:
    """What another task is to raise when we leave because of ``error``."""
    return f"{error.exit_code} {error}"


def retold(text: str) -> SpartitoError:
    """The error that another task has `told`."""
    code, _, message = text.partition(" ")
    what, _, do = message.partition("\n  ")
    kind = TaskLostError if int(code) == EXIT_TASK_LOST else MismatchedCallsError
    return kind(what, do)
