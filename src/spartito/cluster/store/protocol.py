"""What a store and its clients say to each other.

    client: magic, a nonce
    store:  magic, a nonce
    then frames, a request of the client and a reply to it in turn:
    | bytes of the body (4) | HMAC-SHA256 (32) | body: a struct in MessagePack |

The HMAC is over the number of the frame and its body, with a key of this connection and direction
that both derive from the job's secret and the nonces: who does not know the secret can neither
read a key nor write one, and no frame can be changed, repeated, left out or sent back. It proves
who says what. Where the store's address is not loopback all of it lies inside of TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

import msgspec

from spartito.errors import SpartitoError

MAGIC = b"SPKV"
NONCE = 32
HELLO = len(MAGIC) + NONCE
MAC = hashlib.sha256().digest_size
SIZE = struct.Struct("<I")
HEAD = SIZE.size + MAC
LABEL = b"spartito store 1 "
"""Another one wherever this protocol changes its meaning."""

MOST_BODY = 4 << 20
"""Bytes of a frame's body at most, so of a value too."""
MOST_KEYS = 65536
"""Keys of a request at most."""

UNKNOWN = bytes(HEAD)
"""What a store says to who does not know the secret, before it closes."""


class ProtocolError(SpartitoError):
    """What came is no frame of this connection."""


class OtherSecretError(ProtocolError):
    """A frame was not made with the job's secret."""


class TooLongError(SpartitoError):
    """A message is longer than a frame may be."""


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

_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_BROKEN = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""What a decoder raises: text that is no UTF-8 and nesting without an end have Python's errors."""
_encoder = msgspec.msgpack.Encoder()


class Seal:
    """One direction of a connection: makes its frames, or opens them, in their order."""

    def __init__(self, secret: bytes, nonces: bytes, end: bytes) -> None:
        self._key = hmac.digest(secret, LABEL + end + nonces, "sha256")
        self._count = 0

    def close(self, message: Request | Reply) -> bytes:
        """The next frame."""
        body = _encoder.encode(message)
        if len(body) > MOST_BODY:
            raise TooLongError(
                f"a message of {len(body):,} bytes to the store, which takes {MOST_BODY:,} at most"
            )
        return SIZE.pack(len(body)) + self._mac(body) + body

    def open(self, head: bytes, body: bytes) -> bytes:
        """The ``body`` of the next frame, which came behind ``head``, if it is genuine."""
        if not hmac.compare_digest(self._mac(body), head[SIZE.size :]):
            raise OtherSecretError("it does not know the job's secret")
        return body

    def _mac(self, body: bytes) -> bytes:
        number = self._count.to_bytes(8, "little")
        self._count += 1
        return hmac.digest(self._key, number + body, "sha256")


def hello() -> bytes:
    """The first words of either end."""
    return MAGIC + secrets.token_bytes(NONCE)


def seals(secret: bytes, client: bytes, store: bytes) -> tuple[Seal, Seal]:
    """What seals the frames of the client, and of the store, after their `hello`."""
    nonces = client + store
    return Seal(secret, nonces, b"client"), Seal(secret, nonces, b"store")


def size_of(head: bytes) -> int:
    """The bytes of the body behind ``head``; `ProtocolError` for more than are allowed."""
    size: int = SIZE.unpack_from(head)[0]
    if size > MOST_BODY:
        raise ProtocolError(f"a frame of {size:,} bytes")
    return size


def request_of(body: bytes) -> Request:
    """The request in a frame; `ProtocolError` for what is none."""
    try:
        request: Request = _requests.decode(body)
    except _BROKEN as error:
        raise ProtocolError(f"what came is no request: {error}") from error
    return request


def reply_of(body: bytes) -> Reply:
    """The reply in a frame; `ProtocolError` for what is none."""
    try:
        return _replies.decode(body)
    except _BROKEN as error:
        raise ProtocolError(f"what came is no reply: {error}") from error
