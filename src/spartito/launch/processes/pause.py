"""Ctrl-Z stops what a launcher has started as well; ``fg`` and ``bg`` let all of it go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def pausing(pause: Callable[[], None], resume: Callable[[], None]) -> Iterator[None]:
    """In the block SIGTSTP calls ``pause`` and stops this process, SIGCONT calls ``resume``.

    Needed where the tasks are in sessions of their own: the terminal's signal does not reach
    them. Must be called from the main thread. A SIGTSTP that is ignored stays so.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        pause()
        os.kill(os.getpid(), signal.SIGSTOP)  # SIGTSTP would do nothing in an orphaned group

    def wake(number: int, frame: FrameType | None) -> None:
        resume()

    if signal.getsignal(signal.SIGTSTP) == signal.SIG_IGN:
        yield
        return
    old = {
        signal.SIGTSTP: signal.signal(signal.SIGTSTP, stop),
        signal.SIGCONT: signal.signal(signal.SIGCONT, wake),
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
