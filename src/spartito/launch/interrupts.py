"""Signals that ask a launcher to end do not come between a start and the note of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """What asks this process to end waits for the end of the block.

    Handlers of Python run in the main thread alone, so in another one there is nothing to do.
    """
    came: list[int] = []
    old = {}
    for one in ENDING if current_thread() is main_thread() else ():
        before = signal.getsignal(one)
        if before not in (None, signal.SIG_IGN):  # None: not set by Python
            old[one] = before
            signal.signal(one, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        for told in came:
            signal.raise_signal(told)
