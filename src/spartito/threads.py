"""Calls in threads of their own, which may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Begin a call; its thread does not keep the process from ending.

    Args:
        call: What is called.
        name: That of the thread.

    Returns:
        What the call comes to: its result, or the error that it raises.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # raised where the result is asked for
            found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found
