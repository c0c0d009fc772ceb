"""What the connections of a parameter server need of it, and it of them."""

from __future__ import annotations

from typing import Any, Protocol

from spartito.notes import RareWarnings
from spartito.ps.protocol.messages import Hello, Refused
from spartito.ps.server.replica import Replica
from spartito.ps.server.store import Store
from spartito.wire.secret import Key


class Served(Protocol):
    """A task that is served."""

    @property
    def sent(self) -> int:
        """Bytes."""
        ...

    @property
    def received(self) -> int:
        """Bytes."""
        ...

    @property
    def serves(self) -> bool:
        """Whether the task is served as by a primary alone."""
        ...

    def close(self) -> None:
        """End it from another thread."""


class Host(Protocol):
    """The server, as its connections see it."""

    store: Store
    name: str
    wire_dtype: str | None
    key: Key
    shares: bool
    timeout: float
    incarnation: str
    seldom: RareWarnings
    replica: Replica

    def greet(self, hello: Hello) -> Refused | None:
        """Whether a task may come in; `TaskLostError` if what it had given us is lost."""
        ...

    def came(self, connection: Served, chief: bool) -> None:
        """A task was let in."""

    def left(self, connection: Served, chief: bool) -> None:
        """A task is gone."""

    def heard_from_chief(self, reign: int) -> None:
        """The ``reign``-th chief said something; `TaskLostError` if there was a later one."""

    def snapshot(self) -> None:
        """Write what a restarted server goes on from; `UserError` where there is no space."""

    def keep(self) -> None:
        """Write a snapshot of what is there now; a warning where there is no space for it."""

    def record(self) -> dict[str, Any]:
        """What it did, for the run's records."""
        ...

    def fail(self, failure: BaseException) -> None:
        """Serving a task failed in a way that is not the task's fault."""

    def end(self, why: str = "") -> None:
        """The job has ended; ``why`` it did before its training was done, where it did."""
