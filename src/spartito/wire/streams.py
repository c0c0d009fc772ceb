"""Connections on which nothing is read that another than the peer could have sent.

What is sent is cut into records; the receiver checks one as a whole before it hands out a byte of
it. A `Sealed` connection authenticates its records, and `tls.Encrypted` encrypts them too. Either
is used as the socket below it: with or without blocking, by who knows nothing of records.
"""

from __future__ import annotations

import errno
import mmap
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from spartito.system import keep_alive_options, wake_after
from spartito.wire.limits import RECORD, SILENCE

Socket = socket.socket

WAKE = 32 << 10
"""So many bytes of a record that is not complete may come before who waits for it is woken."""

HEAD = struct.Struct("<I16s")
"""What is in front of a sealed record: how many bytes it has, and the tag that proves them."""


class ForgedError(ConnectionError):
    """What came is not what the peer sent: it was changed on its way, or another sent it."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.EBADMSG, what)


class Connection(Protocol):
    """What is used of a connected stream socket, which is one; all as `socket.socket` has it."""

    @property
    def family(self) -> int:
        """AF_INET, AF_INET6 or AF_UNIX."""
        ...

    def sendmsg(self, buffers: Iterable[Any], /) -> int:
        """Send what goes of the buffers; how many bytes."""
        ...

    def sendall(self, data: Any, /) -> None:
        """Send all bytes."""
        ...

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Receive up to so many bytes."""
        ...

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0, /) -> int:
        """Receive into memory; how many bytes, 0 at the end."""
        ...

    def fileno(self) -> int:
        """The descriptor, to wait for."""
        ...

    def getsockname(self) -> Any:
        """This end's address."""
        ...

    def getpeername(self) -> Any:
        """The other end's address."""
        ...

    def setblocking(self, flag: bool, /) -> None:
        """Whether calls wait."""
        ...

    def settimeout(self, value: float | None, /) -> None:
        """How long they wait; None is for ever."""
        ...

    def setsockopt(self, level: int, optname: int, value: Any, /) -> None:
        """Set an option of the system's."""
        ...

    def shutdown(self, how: int, /) -> None:
        """End it, in one direction or both."""
        ...

    def close(self) -> None:
        """End it and free the descriptor."""
        ...

    def __enter__(self) -> Any: ...
    def __exit__(self, *error: object) -> None: ...


class Recorded(ABC):
    """A connection by records, over ``below``, which it owns.

    One thread may send while another receives. After `sendmsg` raised `BlockingIOError`, or
    returned 0, the next call must offer the same bytes first, from wherever they lie then. Who
    waits for the socket to be readable reads until `BlockingIOError` before: a record that came
    may have more.
    """

    def __init__(self, below: Socket) -> None:
        self._below = below
        self._leaving = memoryview(b"")  # what the system has not taken of a record
        self._size = 0  # bytes that it stands for
        self.family = below.family
        self.fileno, self.close, self.shutdown = below.fileno, below.close, below.shutdown
        self.getsockname, self.getpeername = below.getsockname, below.getpeername
        self.setblocking, self.settimeout = below.setblocking, below.settimeout
        self.setsockopt = below.setsockopt

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def sendmsg(self, buffers: Iterable[Any], /) -> int:
        """Send a record of what ``buffers`` begin with; its bytes, or 0 while it is not out."""
        if not self._leaving:
            views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
            if not views:
                return 0
            self._leaving, self._size = self._pack(views)
        self._leaving = self._leaving[self._below.send(self._leaving) :]
        return 0 if self._leaving else self._size

    def sendall(self, data: Any, /) -> None:
        """Send all of ``data``."""
        left = [memoryview(data)] if len(data) else []
        while left:
            left = rest(left, self.sendmsg(left))

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Receive up to ``bufsize`` bytes, with `socket.MSG_WAITALL` all of them unless it ends."""
        data = bytearray(bufsize)
        view, got = memoryview(data), 0
        while got < bufsize and (count := self.recv_into(view[got:])):
            got += count
            if not flags & socket.MSG_WAITALL:
                break
        return bytes(view[:got])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0, /) -> int:
        """Receive into ``buffer``; how many bytes came, 0 at the end."""
        view = memoryview(buffer).cast("B")
        if not len(view):
            return 0
        while not (count := self._unpack(view)):
            if not self._fill():
                return 0
        return count

    @abstractmethod
    def _pack(self, views: Sequence[memoryview]) -> tuple[memoryview, int]:
        """A record of what ``views`` begin with, in memory of our own; how many bytes it has."""

    @abstractmethod
    def _unpack(self, view: memoryview) -> int:
        """Put what came into ``view``; how many bytes, 0 where more must come first."""

    @abstractmethod
    def _fill(self) -> int:
        """Receive from below; how many bytes, 0 at the end."""


class Sealed(Recorded):
    """A connection whose records are authenticated, by AES-GMAC, and not encrypted.

    Their numbers are part of what is authenticated: none can be left out, repeated or moved.

    Args:
        below: The socket.
        own: The key of what this end sends: 32 bytes of this connection and direction alone.
        theirs: That of what it receives.
    """

    def __init__(self, below: Socket, own: bytes, theirs: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        super().__init__(below)
        self._own, self._theirs = AESGCM(own), AESGCM(theirs)
        self._sent = self._received = 0  # records
        self._record = blank(HEAD.size + RECORD)  # that is sent
        self._memory = blank(2 * (HEAD.size + RECORD))
        self._start = self._stop = 0  # where in it that lies which came and is not checked
        self._at = self._end = 0  # where that lies which is checked and not handed out
        self._wakes = 1  # how many bytes have to be there until who waits is woken

    def _pack(self, views: Sequence[memoryview]) -> tuple[memoryview, int]:
        end = HEAD.size
        for view in views:
            part = view[: HEAD.size + RECORD - end]
            self._record[end : end + len(part)] = part
            end += len(part)
            if end == HEAD.size + RECORD:
                break
        record = self._record[:end]
        tag = self._own.encrypt(self._sent.to_bytes(12, "little"), b"", record[HEAD.size :])
        self._sent += 1
        HEAD.pack_into(record, 0, end - HEAD.size, tag)
        return record, end - HEAD.size

    def _unpack(self, view: memoryview) -> int:
        if self._at == self._end and not self._check():
            return 0
        count = min(len(view), self._end - self._at)
        view[:count] = self._memory[self._at : self._at + count]
        self._at += count
        return count

    def _check(self) -> bool:
        """Check the next record, if all of it is here."""
        came = self._stop - self._start
        if came < HEAD.size:
            return False
        size, tag = HEAD.unpack_from(self._memory, self._start)
        if not 0 < size <= RECORD:
            raise ForgedError(f"a record of {size} bytes came, 1 to {RECORD} were expected")
        if came < HEAD.size + size:  # nothing can be done with a part of it
            self._wake_at(min(HEAD.size + size - came, WAKE))
            return False
        self._wake_at(1)
        at = self._start + HEAD.size
        from cryptography.exceptions import InvalidTag

        try:
            number = self._received.to_bytes(12, "little")
            self._theirs.decrypt(number, tag, self._memory[at : at + size])
        except InvalidTag:
            raise ForgedError("what came was changed on its way") from None
        self._received += 1
        self._at, self._start = at, at + size
        self._end = self._start
        return True

    def _wake_at(self, count: int) -> None:
        """Wake who waits for the socket when so many bytes came, and not with each packet.

        On a slow line that would be ten times as often.
        """
        if count != self._wakes:
            self._wakes = count
            wake_after(self._below, count)

    def _fill(self) -> int:
        if self._start:  # all that is checked was handed out
            came = self._stop - self._start
            self._memory[:came] = self._memory[self._start : self._stop]
            self._start, self._stop = 0, came
        count = self._below.recv_into(self._memory[self._stop :])
        self._stop += count
        return count


def rest(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of ``views`` once their first ``count`` bytes are done."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def is_unix(connection: Connection) -> bool:
    """Whether it is a file of this machine, so that nobody can come between its ends."""
    return bool(connection.family == getattr(socket, "AF_UNIX", None))


def peer_host(connection: Connection) -> str:
    """The address of the other end's machine, "" of a file."""
    return "" if is_unix(connection) else str(connection.getpeername()[0])


def disconnect(connection: Connection) -> None:
    """End it in both directions; a thread that waits for it wakes up. May be called again."""
    with suppress(OSError):  # the other end may have been faster
        connection.shutdown(socket.SHUT_RDWR)


def send_no_more(connection: Connection) -> None:
    """Say that nothing more comes; what the other end still says can be received."""
    connection.shutdown(socket.SHUT_WR)


def send_at_once(connection: Connection) -> None:
    """Let what is sent leave without waiting for more."""
    if not is_unix(connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def keep_alive(connection: Connection, silence: int = SILENCE) -> None:
    """Let the kernel ask the other one whether it is there, and close if it is not.

    A process that is stopped or busy is there: its kernel replies. One that takes no more data for
    so long, as its memory for it is full, counts as silent too.

    Args:
        connection: Whose end is meant.
        silence: Seconds without a reply after which it ends; of these the first half pass until it
            is asked, each second then.
    """
    with suppress(OSError):  # no TCP
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in keep_alive_options(silence).items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def blank(size: int) -> memoryview:
    """Memory that the system gives where it is written to: most connections say little."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, size, flags=flags))
