"""Calls of other programs that may never return: they have a limit here."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from spartito.threads import in_thread

T = TypeVar("T")

SLOWEST = 4 << 20
"""Bytes in a second that a line carries at least, where nobody says how far it is."""


class SilentError(TimeoutError):
    """A call was given up; asking again would take as long."""


def limited(work: Callable[[Callable[[], None]], T], silence: float, size: int = 0) -> T:
    """What ``work`` returns, or raises.

    Args:
        work: Is called in a thread, with a function to call whenever something has moved.
        silence: Seconds without such a call after which it is given up.
        size: The bytes that it moves: until the first of these calls it may take as long as they
            take on a slow line, besides.

    Raises:
        SilentError: It was given up. The thread stays, and holds up no end of the process.
    """
    began, moved, allowed = time.monotonic(), 0.0, size / SLOWEST

    def move() -> None:
        nonlocal moved
        moved = time.monotonic()

    reply = in_thread(lambda: work(move), "spartito store")
    while (left := (moved or began + allowed) + silence - time.monotonic()) > 0:
        if wait([reply], min(left, silence)).done:  # with the first move `left` may become less
            return reply.result()
    raise SilentError(f"nothing has moved for {time.monotonic() - (moved or began):.0f} s")
