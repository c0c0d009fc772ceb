"""Several things at the same time, with an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def at_once(work: Callable[[A], B], items: Sequence[A], end: float) -> list[B | None]:
    """``work`` on all ``items`` at the same time; None for what has not ended at ``end``.

    Its threads may live on behind a call that the system does not let go (a name's resolution);
    they never keep the process from ending.
    """
    results: list[B | None] = [None] * len(items)

    def run(index: int, item: A) -> None:
        results[index] = work(item)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return list(results)
