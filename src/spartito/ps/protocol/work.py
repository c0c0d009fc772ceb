"""Messages between a task that computes and the coordinator, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from spartito.collectives.membership.versions import Versions
from spartito.ps.protocol.fields import Amount, Count, Index, Number, Text

PURPOSE = "coordinator"
"""What a connection to the coordinator is for, in the handshake."""
MAX_PUBLISHED = 64 << 20  # bytes


class Lease(msgspec.Struct, frozen=True, tag="lease"):
    """Steps ``start`` to ``stop`` of one slice of pass ``pass_``, for one worker to compute.

    ``group`` numbers the leases that were granted together (0: alone) and ``sizes`` are their
    lengths. Without ``counts`` the work items were reported before, and their sums count no more.
    """

    id: Count
    epoch: Count
    pass_: Number
    data_shard: Number
    start: Number
    stop: Number
    group: Number = 0
    sizes: tuple[Number, ...] = ()
    counts: bool = True

    def parties(self, index: int) -> int:
        """How many members of the group have more than ``index`` work items."""
        return sum(size > index for size in self.sizes)


class Report(msgspec.Struct, frozen=True):
    """All work items of a lease are applied, or else it is ``abandoned``.

    ``sums`` are the worker's own totals over them. ``ended`` is the number of steps of the
    pass, where the worker found its end. ``bad`` pushes were dropped because their gradients
    were not finite; ``detail`` says which. ``metrics`` is the state of the metrics over them; it
    goes over a connection as the payload. ``drawn`` is a checksum of the order of the pass, 0
    where it has none, or the lease had no batch.
    """

    lease: Count
    sums: list[float]
    ended: Number | None = None
    bad: Number = 0
    detail: Text = ""
    abandoned: bool = False
    metrics: Annotated[bytes, Meta(max_length=0)] = b""  # in the header of a message
    drawn: Count = 0


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Nothing to do at present: ask again."""


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """All of ``epoch`` is done; with ``stop`` no more work comes in this stream at all."""

    epoch: Index  # -1: none
    stop: bool = False


Work = Lease | Pause | Complete


class Merge(msgspec.Struct, frozen=True):
    """What becomes of what a group has moved: it is merged with that of ``parties`` groups.

    All of them push it in round ``number``; 0: it is rejected. ``share`` is what the merge
    counts for, ``staleness`` how many merges there were since the group began.
    """

    number: Number
    parties: Number = 0
    share: Amount = 1.0
    staleness: Number = 0


REJECTED = Merge(0)

At = tuple[Count, Number, Number]
"""Up to where a group has done its part: stream, pass and step; zeros before its first merge."""
NOWHERE: At = (0, 0, 0)
PART = 1 << 20
"""Bytes of a state that are sent at once, between which a worker gives its heartbeat."""


class OwnState(Protocol):
    """What a group that trains apart keeps to itself."""

    def show(self) -> tuple[At, bytes]:
        """As it was when the group was merged the last time, and where that was."""
        ...

    def load(self, state: bytes) -> None:
        """Go on from one."""
        ...


class WorkSource(Protocol):
    """Where a task that computes gets its work: a link to the coordinator."""

    @property
    def generation(self) -> int:
        """Which process of its worker this one is; a later one has a larger number."""
        ...

    @property
    def timetable(self) -> bytes:
        """The chief's `Timetable`, encoded, as of the last reply; empty: there is none."""
        ...

    def take(self, stream: int, epoch: int, report: Report | None, wait: bool = True) -> Work:
        """Hand in a report and get work; returns `Pause` only without ``wait``.

        Raises `TaskLostError` that names the tasks which keep everybody waiting.
        """
        ...

    def reach(self, reached: Reached, metrics: bytes) -> None:
        """Tell what is done of a lease whose end others hold up, as they may be saving."""
        ...

    def merge(self, arrival: Arrival) -> Merge:
        """With whom what a group has moved is merged, once that is decided."""
        ...

    def keep(self, own: OwnState) -> None:
        """Give ``own`` to the chief when it asks, and take what it was at a checkpoint."""
        ...

    def give(self) -> None:
        """Give it now, as nothing is asked of the chief for a while."""
        ...

    def published(self, key: int) -> bytes:
        """What the chief publishes under ``key``, once it does."""
        ...

    def fail(self, what: str) -> None:
        """Tell the chief of an exception of this worker's script, which ends the job."""
        ...

    def close(self) -> None:
        """Leave; what is not reported goes to others. Calling it again changes nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Totals:
    """An epoch so far: the sums and metrics of the reports, and how many work items are done.

    The epoch has ``steps`` (None: not known yet) times ``data_shards`` of them.
    """

    sums: list[float]
    work_items: int
    data_shards: int
    steps: int | None
    metrics: list[bytes] = field(default_factory=list)


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a connection: which worker it is, and what it runs.

    ``generation`` is what it got from a chief before this one; 0: it is a new process.
    """

    worker: Index
    versions: Versions
    generation: Count = 0


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """Still here. Has no reply."""


class Take(msgspec.Struct, frozen=True, tag="take"):
    """As `WorkSource.take`; the reply is `Assignment` in about a second at the latest."""

    stream: Count
    epoch: Index  # -1: none
    report: Report | None
    wait: bool


class Arrival(msgspec.Struct, frozen=True, tag="arrival"):
    """A group has done all work items of a lease, apart from the others.

    What it has moved weighs ``weight``, in ``updates`` (1 where groups count the same), and takes
    ``nbytes``; ``loss`` is the sum of its losses, which ``counts`` divides. The reply is
    `Decision` in about a second at the latest.
    """

    stream: Count
    lease: Count
    weight: Amount
    nbytes: Count = 0
    loss: float = 0.0
    counts: Amount = 0.0
    updates: Number = 1


class Reached(msgspec.Struct, frozen=True, tag="reached"):
    """All work items of a lease before ``step`` are in an update, and its next push waits.

    ``sums`` are over them, and the state of their metrics is the payload: as in a `Report` that
    is still to come. Has no reply.
    """

    stream: Count
    lease: Count
    step: Number
    sums: list[float]


class Decision(msgspec.Struct, frozen=True, tag="decision"):
    """What becomes of what a group has moved; None: it is not decided yet."""

    merge: Merge | None
    wants: bool = False


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """As `WorkSource.published`; the reply is `Value` in about a second at the latest."""

    key: Count


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker's script raised an exception: the job cannot go on. Has no reply."""

    what: Text


class Given(msgspec.Struct, frozen=True, tag="given"):
    """A part of what a group keeps to itself is the payload: the ``first``, the ``last``."""

    at: At
    first: bool
    last: bool


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """What this group is to go on from, from byte ``begin``; the reply is `Part`."""

    begin: Count


class Leave(msgspec.Struct, frozen=True, tag="bye"):
    """The worker is done and leaves. Has no reply."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The worker is in as ``generation``; it sends a heartbeat every ``heartbeat`` seconds."""

    heartbeat: Amount
    generation: Count


class Assignment(msgspec.Struct, frozen=True, tag="assignment"):
    """Work; if the chief's timetable has changed since the last reply it is the payload.

    The chief ``wants`` what the group keeps to itself, or ``has`` what it is to go on from.
    """

    work: Work
    changed: bool = False
    wants: bool = False
    has: bool = False


class Value(msgspec.Struct, frozen=True, tag="value"):
    """What was published is the payload; without ``found`` nothing was yet."""

    found: bool
    wants: bool = False


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """A part has come."""


class Part(msgspec.Struct, frozen=True, tag="part"):
    """A part of what this group is to go on from is the payload."""

    last: bool


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """No; the connection ends. ``lost`` when it is because another task has failed."""

    what: Text
    do: Text = ""
    lost: bool = False


ToCoordinator = Hello | Heartbeat | Take | Reached | Arrival | Ask | Given | Fetch | Failed | Leave
ToWorker = Welcome | Assignment | Decision | Value | Taken | Part | Refused
