"""What the doctors of a cluster send each other: as frames of the wire."""

from __future__ import annotations

import msgspec

from spartito.doctor.findings import Facts, Probe, Speed, Target

PURPOSE = "doctor"
"""What a connection between doctors is for, in its handshake."""

MOST_BYTES = 2 << 20
"""Bytes that may go along with a `Data` message."""


class Message(msgspec.Struct, frozen=True, tag=str.lower):
    """What one doctor says to another."""


class Ping(Message, frozen=True):
    """Who are you, and what time is it?"""


class Pong(Message, frozen=True):
    """The reply."""

    task: str
    clock: float


class Data(Message, frozen=True):
    """Bytes go along with it; the reply, once they have come, is a `Pong`."""


class Join(Message, frozen=True):
    """A task comes to the coordinator; its doctor listens at ``host`` ("": as seen)."""

    facts: Facts
    port: int
    host: str = ""


class Invite(Message, frozen=True):
    """The coordinator came to the task, which replies with a `Join` unless it is in already."""


class Welcome(Message, frozen=True):
    """The task is in; orders come for at most so many seconds."""

    seconds: float


class Refused(Message, frozen=True):
    """The task is not let in."""

    why: str


class ProbeOrder(Message, frozen=True):
    """Connect to all of these at the same time, within so many seconds."""

    targets: list[Target]
    seconds: float


class Probed(Message, frozen=True):
    """What came of it."""

    probes: list[Probe]


class MeasureOrder(Message, frozen=True):
    """Measure the connection to this one, within so many seconds."""

    target: Target
    seconds: float


class Measured(Message, frozen=True):
    """What came of it: no ``speed`` when it failed.

    ``stuck``: bytes of the message that did not arrive, though small ones did; 0 where none failed.
    """

    speed: Speed | None
    stuck: int = 0


class End(Message, frozen=True):
    """The task exits with this code."""

    code: int
    summary: str


Request = Ping | Data | Join | Invite
"""What a doctor that listens may be asked."""

Order = ProbeOrder | MeasureOrder
"""What the coordinator may have a task do."""

FromCoordinator = Order | End | Refused | Welcome
"""All that the coordinator sends."""

FromAny = Request | FromCoordinator | Pong | Probed | Measured
"""All that a doctor may hear."""
