"""Our own framed messages on a socket: a fixed prefix, a msgpack header, the bytes of a payload.

    | prefix: 32 bytes | header: the message | zeros | payload: bytes of the flat vector, or none |

Prefix and header are filled up to 256 bytes, so that nearly every frame is one call of the system.

Nothing that comes is believed before it is checked: the prefix and the header by a CRC, every
length against its limit before anything is allocated, the payload by a sum of its words where it
leaves the machine.
``docs/reference/protocol.md`` has the whole format.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import time
import zlib
from typing import TYPE_CHECKING, Any

import msgspec

from spartito.decoders import msgpack_decoder
from spartito.errors import SpartitoError
from spartito.forks import keep_from_forks
from spartito.wire.handshake import MAGIC, VERSION
from spartito.wire.limits import MOST_BUFFERS, MOST_HEADER
from spartito.wire.streams import Connection, disconnect, is_unix, rest, send_at_once

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy.typing as npt
    from typing_extensions import Buffer

    Contiguous: TypeAlias = Buffer | npt.NDArray[Any]  # numpy declares no Buffer before 3.12

NO_SUM = 1
"""The flag of a frame whose payload has no sum: it does not leave the machine."""

PREFIX = struct.Struct("<4sBBHIQIQ")
"""Magic, version, flags, reserved, header bytes, payload bytes, CRC-32, sum of the payload."""
START = 256
"""Bytes that every frame begins with: the prefix, the header, and zeros where that is shorter."""
_CRC = struct.Struct("<I")
_CRC_AT = 20
_ZEROS = bytes(START)
_NOTHING = memoryview(b"")
_WORD = 8
_WRAP = (1 << 64) - 1
_CHUNK = 1 << 19  # bytes that are received, then added up: they fit in the cache of one core
_TIMEVAL = struct.Struct("@ll")


class ProtocolError(SpartitoError):
    """A frame breaks the rules: says what was expected and what came."""


class TooLongError(ProtocolError):
    """A message of ours is longer than the other end takes; nothing of it was sent."""


class Gone(ConnectionError):
    """The other end closed the connection or died, or this end was closed meanwhile."""


def checksum(payload: memoryview, offset: int = 0) -> int:
    """The sum of the payload's little-endian 64-bit words, modulo 2**64; of nothing 0.

    The last word is filled up with zeros. ``offset`` is where in the whole payload these bytes
    begin: the sums of the parts add up to the sum of the whole. 0.02 to 0.05 ms per MB.
    """
    import numpy as np  # here: who sends no tensors starts without it

    phase = offset % _WORD
    lead = min(-phase % _WORD, len(payload))
    words = (len(payload) - lead) // _WORD
    last = lead + words * _WORD
    total = int.from_bytes(payload[:lead], "little") << (8 * phase)
    if words:
        total += int(np.add.reduce(np.frombuffer(payload, "<u8", words, lead)))
    return (total + int.from_bytes(payload[last:], "little")) & _WRAP


class Wire:
    """Framed messages on one connected stream socket (TCP or UNIX).

    One thread may send while another receives. After any error the wire is of no use any more:
    where the next frame begins is not known. Close it.
    """

    def __init__(
        self, sock: Connection, accepts: Any, *, limit: int = 0, timeout: float | None = None
    ) -> None:
        """Take over ``sock``, which becomes a blocking one.

        ``accepts`` is the tagged `msgspec.Struct`, or the union of some, that `receive` decodes;
        ``limit`` the most bytes of a payload that it allocates memory for; ``timeout`` the seconds
        that each `send` and each `receive` may take (at most twice that if the other end is not
        silent, but slow), for ever if None.
        """
        self.limit = limit
        self.header_limit = MOST_HEADER
        """The most bytes of a header, sent or received; set it once both ends know each other."""
        self.sent = 0
        self.received = 0
        self.payload = _NOTHING
        self.sums = not _is_local(sock)
        """Whether payloads are sent with a sum: those that leave the machine are."""
        self._sock = sock
        keep_from_forks(sock.fileno())
        self._encode = msgspec.msgpack.Encoder().encode_into
        self._decode = msgpack_decoder(accepts).decode
        self._head = bytearray(START)
        self._start = memoryview(bytearray(START))
        self._short = self._start[PREFIX.size :]
        self._long = _NOTHING  # for headers that do not fit there
        self._buffer = _NOTHING  # for payloads without a target
        send_at_once(sock)
        sock.settimeout(None)
        self.timeout = timeout

    @property
    def timeout(self) -> float | None:
        """Seconds that each `send` and each `receive` may take; None is for ever."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self.set_timeouts(send=seconds, receive=seconds)

    def set_timeouts(self, *, send: float | None, receive: float | None) -> None:
        """As `timeout`, but another limit for each direction: who serves waits for questions."""
        self._timeout, self._send_timeout = receive, send
        # The kernel's own time limits save the poll that Python's would cost at each call.
        for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
            micro = 0 if seconds is None else max(1, round(seconds * 1e6))
            value = _TIMEVAL.pack(micro // 1_000_000, micro % 1_000_000)
            self._sock.setsockopt(socket.SOL_SOCKET, option, value)

    def send(self, message: msgspec.Struct, *payload: Contiguous) -> None:
        """Send ``message`` and the bytes of ``payload``: contiguous buffers, never copied.

        Raises `Gone`, `TimeoutError`, and `ProtocolError` for a header above `header_limit`.
        """
        head = self._head
        self._encode(message, head, PREFIX.size)
        length = len(head) - PREFIX.size
        if length > self.header_limit:
            raise TooLongError(
                f"a {type(message).__name__.lower()} of {length:,} bytes; the other end takes "
                f"{self.header_limit:,} at most"
            )
        head += _ZEROS[len(head) :]
        parts = [memoryview(head)]
        size = total = 0
        for buffer in payload:
            view = memoryview(buffer)  # type: ignore[arg-type]
            if view.nbytes:
                view = view.cast("B")
                total += checksum(view, size) if self.sums else 0
                size += view.nbytes
                parts.append(view)
        flags = 0 if self.sums else NO_SUM
        PREFIX.pack_into(head, 0, MAGIC, VERSION, flags, 0, length, size, 0, total & _WRAP)
        _CRC.pack_into(head, _CRC_AT, zlib.crc32(head))
        try:
            self._send_all(parts, len(head) + size)
        except BaseException:
            self._head = bytearray(START)  # who keeps the error has views of that one
            raise

    def receive(self, into: memoryview | None = None) -> Any:
        """The next message; its payload lies in `payload` until the next call.

        The payload goes to ``into`` if it is exactly as large. Otherwise it goes to a buffer of
        the wire's own, which never grows beyond `limit`.
        Raises `Gone`, `TimeoutError`, and `ProtocolError` for anything that breaks the rules.
        """
        self.payload = _NOTHING
        start, end = self._start, _end(self._timeout)
        got = self._recv(start, 0, end)
        while got < START:
            _check_start(start[:got])  # an unknown peer may wait for us after fewer bytes
            got += self._recv(start, got, end)
        magic, version, flags, reserved, length, size, crc, total = PREFIX.unpack_from(start)
        if version != VERSION or magic != MAGIC:
            _check_start(start)
        if flags & ~NO_SUM or reserved:
            raise ProtocolError(
                f"flags 0 or 1 and reserved 0 were expected, {flags} and {reserved} came"
            )
        _CRC.pack_into(start, _CRC_AT, 0)
        found = zlib.crc32(start)
        if length <= len(self._short):
            header = self._short[:length]
        else:
            header = self._receive_header(length, end)
            found = zlib.crc32(header[len(self._short) :], found)
        if found != crc:
            raise ProtocolError("the header's CRC is wrong: it was damaged on its way")
        target = self._target(size, into) if size else _NOTHING
        message = self._message(header)
        if flags & NO_SUM:
            self._fill(target, 0, end)
        elif (size or total) and self._receive_payload(target, end) != total:
            raise ProtocolError("the payload's sum is wrong: it was damaged on its way")
        self.payload = target
        self.received += max(START, PREFIX.size + length) + size
        return message

    def ready(self, seconds: float) -> bool:
        """Whether something has come, or the connection has ended; waits so long at most."""
        try:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(seconds * 1000))
        except (OSError, ValueError):  # closed by another thread
            return True

    def close(self) -> None:
        """End the connection; a thread that waits on it gets `Gone`. May be called again."""
        disconnect(self._sock)
        self._sock.close()

    def _receive_header(self, length: int, end: float) -> memoryview:
        """A header that goes beyond the start of its frame, once that is here."""
        if length > self.header_limit:
            raise ProtocolError(
                f"a header of {length} bytes came; it may have at most {self.header_limit}"
            )
        if length > len(self._long):
            self._long = memoryview(bytearray(length))
        header, before = self._long[:length], len(self._short)
        header[:before] = self._short
        self._fill(header, before, end)
        return header

    def _receive_payload(self, target: memoryview, end: float) -> int:
        """Fill ``target``; the sum of what came, added up while it is still in the cache."""
        total = 0
        for start in range(0, len(target), _CHUNK):
            chunk = target[start : start + _CHUNK]
            self._fill(chunk, 0, end)
            total += checksum(chunk)
        return total & _WRAP

    def _target(self, size: int, into: memoryview | None) -> memoryview:
        """Where a payload of ``size`` bytes goes; there are some."""
        if into is not None and size == into.nbytes:
            return into.cast("B")
        if size > self.limit:
            raise ProtocolError(
                f"{size} bytes of payload came; {self.limit} are the most that are taken here"
            )
        if size > len(self._buffer):
            buffer = min(self.limit, max(size, 2 * len(self._buffer)))
            import numpy as np

            self._buffer = np.empty(buffer, np.uint8).data
        return self._buffer[:size]

    def _message(self, header: memoryview) -> Any:
        try:
            return self._decode(header)
        # Text that is no UTF-8 and nesting without an end have Python's own errors.
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"a message that is not known here came: {error}") from error

    def _send_all(self, parts: list[memoryview], size: int) -> None:
        end = _end(self._send_timeout)
        left = size
        while True:
            try:
                count = self._sock.sendmsg(parts[:MOST_BUFFERS])
            except BlockingIOError as error:
                raise TimeoutError(f"nothing was taken within {self._send_timeout:g} s") from error
            except OSError as error:
                raise _end_of(error) from error
            left -= count
            if left == 0:
                break
            if time.monotonic() > end:
                raise TimeoutError(f"{left} of {size} bytes were not taken in time")
            parts = rest(parts, count)
        self.sent += size

    def _fill(self, view: memoryview, got: int, end: float) -> None:
        """Receive until all of ``view`` from ``got`` on is there."""
        while got < len(view):
            got += self._recv(view, got, end, socket.MSG_WAITALL)

    def _recv(self, view: memoryview, got: int, end: float, flags: int = 0) -> int:
        """Receive into ``view`` from ``got`` on; how many bytes came, at least one."""
        if got and time.monotonic() > end:
            raise TimeoutError(f"{got} of {len(view)} bytes came in time")
        try:
            count = self._sock.recv_into(view[got:] if got else view, 0, flags)
        except BlockingIOError as error:
            raise TimeoutError(f"nothing came within {self._timeout:g} s") from error
        except OSError as error:
            raise _end_of(error) from error
        if count == 0:
            raise Gone("the other end closed the connection")
        return count


def _end_of(error: OSError) -> OSError:
    """What ended a connection: our limit, or the kernel's, to which the other machine is gone."""
    if isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT:
        return TimeoutError(*error.args)
    return Gone(*error.args)


def _is_local(sock: Connection) -> bool:
    """Whether both ends are on one machine: they have the same address there, or none at all."""
    if is_unix(sock):
        return True
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:  # it is closed already
        return False


def need(holds: bool, rule: str) -> None:
    """Raise `ProtocolError` with the ``rule`` unless it ``holds``."""
    if not holds:
        raise ProtocolError(rule)


def _end(seconds: float | None) -> float:
    return float("inf") if seconds is None else time.monotonic() + seconds


def _check_start(start: Buffer) -> None:
    """Refuse what does not begin as a frame of our version; ``start`` may be shorter than that."""
    begin = bytes(start)
    if not MAGIC.startswith(begin[: len(MAGIC)]):
        raise ProtocolError(
            f"{MAGIC!r} was expected, {begin[: len(MAGIC)]!r} came: this is no task of Spartito"
        )
    if len(begin) > len(MAGIC) and begin[len(MAGIC)] != VERSION:
        raise ProtocolError(
            f"version {VERSION} was expected, {begin[len(MAGIC)]} came: "
            "all tasks must run the same Spartito"
        )
