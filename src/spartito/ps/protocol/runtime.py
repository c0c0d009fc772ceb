"""What ps takes from the system to run: threads, locks, the clock, and connections.

All of ps reaches them through a `Runtime`, so that a simulation can run the same code in virtual
time, where tasks take turns and connections lie in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Channel(Protocol):
    """Framed messages in both directions, as `Wire` sends them over a socket."""

    limit: int
    header_limit: int
    sent: int
    received: int
    payload: memoryview
    timeout: float | None

    def send(self, message: Any, *payload: Any) -> None:
        """Send one message."""

    def receive(self, into: memoryview | None = None) -> Any:
        """The next message; its payload is in ``into``, if it fits there, and in `payload`."""

    def ready(self, seconds: float) -> bool:
        """Whether something has come, or the connection has ended; waits so long at most."""
        ...

    def set_timeouts(self, *, send: float | None, receive: float | None) -> None:
        """The seconds that each of them may take."""

    def close(self) -> None:
        """End the connection."""


class Condition(Protocol):
    """As `threading.Condition`."""

    def __enter__(self) -> bool: ...
    def __exit__(self, *error: Any) -> None: ...
    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified, for ``timeout`` seconds at most."""
        ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``predicate`` holds, for ``timeout`` seconds at most."""
        ...

    def notify_all(self) -> None:
        """Wake all who wait."""


class Event(Protocol):
    """As `threading.Event`."""

    def is_set(self) -> bool:
        """Whether it was set."""
        ...

    def set(self) -> None:
        """Set it, and wake all who wait."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for ``timeout`` seconds at most."""
        ...


class Joinable(Protocol):
    """A thread that runs."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, for ``timeout`` seconds at most."""


class Runtime(Protocol):
    """Threads, locks and a clock."""

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""
        ...

    def sleep(self, seconds: float) -> None:
        """Do nothing for so long."""

    def lock(self) -> AbstractContextManager[Any]:
        """As `threading.Lock`."""
        ...

    def condition(self) -> Condition:
        """As `threading.Condition`."""
        ...

    def event(self) -> Event:
        """As `threading.Event`."""
        ...

    def start(self, target: Callable[[], None], name: str, daemon: bool = True) -> Joinable:
        """Run ``target`` in a thread."""
        ...

    def current(self) -> Joinable:
        """The thread that asks."""
        ...


class System(Runtime):
    """The threads and the clock of this process."""

    now = staticmethod(time.monotonic)
    lock = staticmethod(threading.Lock)
    condition = staticmethod(threading.Condition)
    event = staticmethod(threading.Event)
    current = staticmethod(threading.current_thread)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def start(self, target: Callable[[], None], name: str, daemon: bool = True) -> Joinable:
        thread = threading.Thread(target=target, name=name, daemon=daemon)
        thread.start()
        return thread


SYSTEM = System()
