"""Calls of other programs that may never return: they have a limit here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

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
    call = _Call(work)
    allowed = size / SLOWEST
    while (left := call.gives_up(silence, allowed) - time.monotonic()) > 0:
        if call.over.wait(min(left, silence)):  # with the first move `left` may become less
            break
    else:
        raise SilentError(f"nothing has moved for {time.monotonic() - call.last:.0f} s")
    if call.error is not None:
        raise call.error
    return call.result


class _Call(Generic[T]):
    def __init__(self, work: Callable[[Callable[[], None]], T]) -> None:
        self.over = threading.Event()
        self.began = time.monotonic()
        self.moved = 0.0
        """When something has moved last; 0: nothing has yet."""
        self.error: BaseException | None = None
        self.result: T
        self._work = work
        threading.Thread(target=self._run, name="spartito store", daemon=True).start()

    def gives_up(self, silence: float, allowed: float) -> float:
        """When it is given up, as of now."""
        return (self.moved or self.began + allowed) + silence

    @property
    def last(self) -> float:
        """When something has moved last, or it began."""
        return self.moved or self.began

    def _run(self) -> None:
        try:
            self.result = self._work(self._move)
        except BaseException as error:
            self.error = error
        self.over.set()

    def _move(self) -> None:
        self.moved = time.monotonic()
