"""What a store and its clients say to each other: a request of the client and a reply, in turn.

They are the frames of `spartito.wire.frames`, behind its handshake: who does not know the job's
secret can neither read a key nor write one, and no frame can be changed, repeated or left out.
"""

from __future__ import annotations

import msgspec

from spartito.decoders import msgpack_decoder
from spartito.errors import SpartitoError

PURPOSE = "store"
"""What its connections are for, in their handshake."""

MOST_KEYS = 65536
"""Keys of a request at most."""


class BrokenRequestError(SpartitoError):
    """What was kept is no request."""


class Set(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give ``key`` a value."""

    key: str
    value: bytes


class Add(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Add ``amount`` to the number at ``key`` (none is 0), and say what it is then."""

    key: str
    amount: int


class Swap(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give ``key`` the value ``new`` if its value is ``expected`` (None: it has none); say it."""

    key: str
    expected: bytes | None
    new: bytes


class Delete(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget ``key``; say its value."""

    key: str


class Gather(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Say the values of ``keys``, once all have one or ``seconds`` are over: of those that do."""

    keys: tuple[str, ...]
    seconds: float


class Keys(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Say the keys that begin with ``prefix``, and their values."""

    prefix: str


class Hold(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give ``key`` a value for as long as this connection stays open."""

    key: str
    value: bytes


class Retire(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget all that begins with ``prefix``, and refuse it from now on."""

    prefix: str


Request = Set | Add | Swap | Delete | Gather | Keys | Hold | Retire


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """What a store says: values by key, or why it did not do it."""

    found: dict[str, bytes] = {}
    refused: str = ""


RETIRED = "retired"
FULL = "full"

_requests = msgpack_decoder(Request)


def request_of(body: bytes) -> Request:
    """The request that ``body`` is; `BrokenRequestError` for what is none."""
    try:
        request: Request = _requests.decode(body)
    # Text that is no UTF-8 and nesting without an end have Python's own errors.
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise BrokenRequestError(f"what was kept is no request: {error}") from error
    return request
