"""Signals that ask a launcher to end do not come between a start and the note of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a launcher to end."""


@contextmanager
def interrupts_held() -> Iterator[None]:
    """What asks this process to end waits for the end of the block.

    Handlers of Python run in the main thread alone, so in another one there is nothing to do.
    """
    came: list[int] = []
    old: dict[int, Any] = {}
    is_over = False

    def hold(number: int, _: object) -> None:
        if is_over:  # another one was raised before all handlers were back
            signal.signal(number, old[number])
            signal.raise_signal(number)
        else:
            came.append(number)

    try:
        for one in ENDING if current_thread() is main_thread() else ():
            before = signal.getsignal(one)
            if before not in (None, signal.SIG_IGN):  # None: not set by Python
                old[one] = before
                signal.signal(one, hold)
        yield
    finally:
        is_over = True
        for number, handler in old.items():
            signal.signal(number, handler)
        for told in came:
            signal.raise_signal(told)
