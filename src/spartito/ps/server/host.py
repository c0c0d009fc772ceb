"""What a connection and its server need of each other."""

from __future__ import annotations

from typing import Any, Protocol

from spartito.log import RareWarnings
from spartito.ps.protocol.messages import Hello, Refused
from spartito.ps.server.store import Store


class ServedTask(Protocol):
    """One task's connection."""

    @property
    def sent(self) -> int:
        """Bytes."""

    @property
    def received(self) -> int:
        """Bytes."""

    def close(self) -> None:
        """End it from another thread."""


class Host(Protocol):
    """The server that a connection belongs to."""

    store: Store
    name: str
    wire_dtype: str | None
    incarnation: str
    shares: bool
    key: bytes
    timeout: float
    seldom: RareWarnings

    def greet(self, hello: Hello) -> Refused | None:
        """Whether a task may come in."""
        ...

    def came(self, connection: ServedTask, chief: bool) -> None:
        """A task was let in."""
        ...

    def left(self, connection: ServedTask, chief: bool) -> None:
        """A task is gone."""
        ...

    def heard_from_chief(self) -> None:
        """The chief said something."""
        ...

    def snapshot(self) -> None:
        """Write what a restarted server goes on from."""
        ...

    def record(self) -> dict[str, Any]:
        """What it did so far."""
        ...

    def end(self) -> None:
        """The job has ended."""
        ...

    def fail(self, failure: BaseException) -> None:
        """Serving a task went wrong in a way that is not the task's fault."""
        ...
