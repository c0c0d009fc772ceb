"""Messages between tasks and parameter servers; ``docs/reference/protocol.md`` has their order."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from spartito.collectives.membership.versions import Versions
from spartito.ps.protocol.fields import Amount, Count, Index, Name, Norm, Number, Text
from spartito.ps.protocol.keys import Key

PURPOSE = "ps"
"""What a connection to a server is for, in the handshake."""


class Message(msgspec.Struct, frozen=True, tag_field="kind", array_like=False):
    """The head of a frame; its payload, if it has one, are bytes of the span or of tensors."""


class Errand(Enum):
    """What a connection to a server is for."""

    SERVE = "serve"
    """Gradients, values, and what the chief tells: the primary's alone."""
    WATCH = "watch"
    """To ask a server what it is, and as the chief to say what it shall be."""
    COPY = "copy"
    """A primary tells its backup what it does."""


class Hello(Message, frozen=True, tag="hello"):
    """A task comes: which job and schema it has, and whether it could share memory."""

    task: Name
    worker: Index
    """Its number among those that compute, -1 for a chief that does not."""
    chief: bool
    job: Name
    digest: Name
    versions: Versions
    rules: Text
    """What must be equal on all tasks beside the schema, as text."""
    host: Name
    """`host_key` of its machine, empty when it wants no shared memory."""
    generation: Count = 0
    """Which process of the worker it is, as the coordinator numbers them."""
    loaded: bool = False
    """The chief has given this server its values: it must have them."""
    errand: Errand = Errand.SERVE
    term: Count = 0
    """In which the primary that comes to its backup was appointed."""


class Welcome(Message, frozen=True, tag="welcome"):
    """Reply to `Hello`: whether it holds values of this job, and what it shares."""

    ready: bool
    incarnation: Name
    """Another one than before: the server was started again."""
    segment: Text = ""
    """The file to map: push area, then pull area; empty means that payloads go by the wire."""
    socket: Text = ""
    """Where to connect again for control, on the same machine."""
    term: Count = 0
    """In which the server was appointed."""


class Load(Message, frozen=True, tag="load"):
    """The chief's values as payload; the optimizer's tensors follow as `LoadState`."""

    job: Name
    settings: list[dict[Name, Any]]
    tensors: Number


class LoadState(Message, frozen=True, tag="load_state"):
    """One tensor of the optimizer's state; its elements are the payload."""

    slot: Number
    key: Name
    dtype: Name
    shape: Annotated[list[Number], Meta(max_length=64)]


class Push(Message, frozen=True, tag="push"):
    """A gradient of some work items, as payload or in shared memory, and a request for values.

    ``absent`` are entries without a gradient, and buffers that did not change. Runs of the span
    that consist of such entries alone do not travel.
    """

    keys: list[Key]
    pulled: Count
    """The version of the values that it was computed with."""
    weight: Amount
    examples: Number
    absent: list[Number]
    dropped: bool = False
    """The gradient was not finite: the work items count as applied, and change nothing."""
    norm: Norm = 0.0
    """The L2 norm of the gradient, as far as it is for this server."""
    pull: bool = True
    group: Number = 0
    index: Number = 0
    parties: Number = 0
    updates: Number = 1
    """How many of its worker's own updates it is made of."""
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """What a merge counts for, by which the learning rate is multiplied; equal for its parties."""
    staleness: Number = 0
    """In a round: how many updates were made since its worker's values."""


class Pull(Message, frozen=True, tag="pull"):
    """A request for values: to compute with (``admit``), or only to read."""

    admit: bool


class Outcome(Enum):
    """What became of a push."""

    APPLIED = "applied"
    """It counts, once."""
    DUPLICATE = "duplicate"
    """All its work items were known: nothing changed."""
    STALE = "stale"
    """It is beyond the bound, or its worker was given up: pull, and compute it again."""
    EXPIRED = "expired"
    """The others of its group went on without it: give the lease back."""


class Values(Message, frozen=True, tag="values"):
    """The values as payload or in shared memory, if they were asked for."""

    version: Count
    pushes: Count
    work_items: Count
    examples: Count
    unchanged: list[Number] | None = None
    """The runs of the span that do not travel, as they are what this connection brought before;
    None where no values travel at all."""
    outcome: Outcome = Outcome.APPLIED
    """Of a push."""
    staleness: Count = 0


def furthest(one: Values, other: Values) -> Values:
    """The larger of each count."""
    grows = one.version <= other.version and one.pushes <= other.pushes
    if grows and one.work_items <= other.work_items and one.examples <= other.examples:
        return other
    return Values(
        max(one.version, other.version),
        max(one.pushes, other.pushes),
        max(one.work_items, other.work_items),
        max(one.examples, other.examples),
    )


def advance(before: Values, now: Values, shards: int) -> tuple[int, int, int]:
    """Examples, global batches and global steps that were done between two looks, 0 at least.

    A global batch is ``shards`` work items, a global step as many pushes.
    """
    return (
        max(0, now.examples - before.examples),
        max(0, now.work_items // shards - before.work_items // shards),
        max(0, now.pushes // shards - before.pushes // shards),
    )


class Release(Message, frozen=True, tag="release"):
    """This worker has nothing to compute: nobody needs to wait for it."""


class Lost(Message, frozen=True, tag="lost"):
    """The chief: a worker is lost, which had a lease of ``size`` work items in ``group``."""

    worker: Number
    group: Number
    size: Number


class Fence(Message, frozen=True, tag="fence"):
    """The chief: the generation of the process that is each worker now. Earlier ones are refused.

    A server knows generations from the chief alone, and keeps them in its memory alone: one that
    was started again lets no worker in before the chief has told it.
    """

    generations: dict[Number, Count]


class Schedule(Message, frozen=True, tag="schedule"):
    """The chief: the optimizer's options by global step; a `Timetable` is the payload."""


class Flush(Message, frozen=True, tag="flush"):
    """The chief: apply what waits to be put together with more pushes.

    ``keep``: reply when a snapshot has all updates, as nobody can compute them again later.
    """

    keep: bool = False


class Status(Message, frozen=True, tag="status"):
    """How far the updates are: `Values` without a payload."""


class Appoint(Message, frozen=True, tag="appoint"):
    """The chief: be the primary in ``term``, with the backup at ``backup``, or alone.

    Only who has all values can be, unless the job is ``fresh`` and they come, or nobody has them:
    ``restore`` goes on from the snapshot of ``job``.
    """

    term: Count
    job: Name
    backup: Name = ""
    fresh: bool = False
    restore: bool = False


class Copying(Enum):
    """What a primary knows of its backup."""

    ALONE = "alone"
    """There is none."""
    BEHIND = "behind"
    """It does not have all yet: nothing waits for it."""
    WHOLE = "whole"
    """It has all that ever had a reply."""
    LOST = "lost"
    """It is gone: nothing has a reply before the chief has said what to do."""


class Stand(Message, frozen=True, tag="stand"):
    """What are you? `Standing` comes back."""


class Standing(Message, frozen=True, tag="standing"):
    """What a server is: ``whole`` if it is a backup that could be appointed."""

    term: Count
    primary: bool
    whole: bool
    copying: Copying


class Elsewhere(Message, frozen=True, tag="elsewhere"):
    """Reply to `Hello`: another server of this span is the primary, or none is yet."""


class Copy(Message, frozen=True, tag="copy"):
    """To a backup: all that the primary has; the payload are these tensors, one after the other.

    Each has a name, a dtype and a shape.
    """

    tensors: list[tuple[Name, Name, Annotated[list[Number], Meta(max_length=64)]]]


class Whole(Message, frozen=True, tag="whole"):
    """To a backup: it has all that ever had a reply, and from now on nothing has one before."""


class Update(Message, frozen=True, tag="update"):
    """To a backup: an update with the payload as gradient, or work items that change nothing.

    ``options`` hold from this update on; ``ended`` is each worker's last round: (stream, group,
    index). The rest is what `Shard.update` takes, and what is counted.
    """

    keys: list[Key]
    examples: Number
    pushes: Number
    absent: list[Number] = []
    rate: Amount = 1.0
    fresh: Amount = 1.0
    options: list[dict[Name, Any]] | None = None
    ended: dict[Number, tuple[Number, Number, Number]] = {}
    changes: bool = False


class GetState(Message, frozen=True, tag="get_state"):
    """The chief wants everything: `State` and then the tensors come."""


class State(Message, frozen=True, tag="state"):
    """The values as payload; as many `LoadState` follow."""

    tensors: Number
    settings: list[dict[Name, Any]]


class GetApplied(Message, frozen=True, tag="get_applied"):
    """The chief wants to know which work items the shard has applied."""


class Applied(Message, frozen=True, tag="applied"):
    """The payload is what `Keys.dump` returns."""


class GetRecord(Message, frozen=True, tag="get_record"):
    """The chief wants to know what the server did so far."""


class Record(Message, frozen=True, tag="record"):
    """Its counts and its histogram of staleness, as a run's records keep them."""

    figures: dict[Name, Any]


class Done(Message, frozen=True, tag="done"):
    """It is done."""


class Refused(Message, frozen=True, tag="refused"):
    """It cannot be: why, and what to do; ``lost`` when it is for want of another task."""

    why: Text
    advice: Text
    lost: bool = False


class End(Message, frozen=True, tag="end"):
    """The job has ended; ``why`` it did before its training was done, where it did."""

    why: Text = ""


Request = (
    Hello | Load | LoadState | Schedule | Push | Pull | Release | Lost | Fence | Flush | Status
    | GetState | GetApplied | GetRecord | End | Appoint | Stand | Copy | Whole | Update
)  # fmt: skip
Reply = (
    Welcome | Values | State | LoadState | Applied | Record | Done | Refused | Standing | Elsewhere
)
