"""What the tasks print: whole lines with the task's name before them, errors held back."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from spartito.errors import PREFIX

LONGEST_LINE = 8 << 20
"""Bytes of one line that are kept in memory; a longer one is cut into several."""

READ_SIZE = 1 << 16
TORCH_RANK = re.compile(rb"^\[rank\d+\]: ")
COLOURS = (36, 33, 35, 32, 34, 91, 96, 93)


class LineCutter:
    """Cuts a stream of bytes into lines; the last one may lack its newline."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, each with its newline."""
        first, *rest = data.split(b"\n")
        lines: list[bytes] = []
        for following in rest:
            lines.append(self._take(first) + b"\n")
            first = following
        if first:
            self._parts.append(first)
            self._size += len(first)
        if self._size > LONGEST_LINE:
            lines.append(self._take(b"") + b"\n")
        return lines

    def finish(self) -> list[bytes]:
        """The line without a newline at the end of the stream, if any; it gets one."""
        return [self._take(b"") + b"\n"] if self._parts else []

    def _take(self, end: bytes) -> bytes:
        line = b"".join([*self._parts, end])
        self._parts.clear()
        self._size = 0
        return line


@dataclass
class Sink:
    """Where lines of all tasks go: one of our own two streams."""

    stream: BinaryIO
    coloured: bool

    @classmethod
    def of(cls, stream: BinaryIO) -> Sink:
        """Coloured on a terminal that shows colours, unless NO_COLOR asks for none."""
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return cls(stream, stream.isatty() and not plain)

    def write(self, lines: list[bytes]) -> None:
        """Print ``lines`` as they are."""
        rest = memoryview(b"".join(lines))
        while rest:  # without a buffer (python -u) a signal may cut a write short
            rest = rest[self.stream.write(rest) :]
        self.stream.flush()

    def prefix(self, name: str, place: int) -> bytes:
        """What stands before each line of the task ``name``, the ``place``-th; "" has nothing."""
        if not name:
            return b""
        text = f"[{name}] "
        if self.coloured:
            text = f"\033[{COLOURS[place % len(COLOURS)]}m[{name}]\033[0m "
        return text.encode()


@dataclass
class Channel:
    """One output of one task, on its way from a pipe to a sink.

    With ``keeps_last`` the last line waits for `close`: it is the result of the job. ``log``
    gets every line as it comes.
    """

    fd: int
    sink: Sink
    prefix: bytes
    keeps_last: bool = False
    log: Callable[[list[bytes]], None] | None = None
    last: list[bytes] = field(default_factory=list)
    cutter: LineCutter = field(default_factory=LineCutter)

    def read(self) -> bool:
        """Take what is there and print its whole lines; False at the end of the stream."""
        try:
            data = os.read(self.fd, READ_SIZE)
        except BlockingIOError:
            return True
        self._came(self.cutter.feed(data) if data else self.cutter.finish())
        return bool(data)

    def drain(self) -> None:
        """Take what a process that has ended left in the pipe."""
        while True:
            try:
                data = os.read(self.fd, READ_SIZE)
            except BlockingIOError:  # someone else holds the pipe open; we wait for nobody
                data = b""
            if not data:
                self._came(self.cutter.finish())
                return
            self._came(self.cutter.feed(data))

    def _came(self, lines: list[bytes]) -> None:
        if self.log is not None:
            self.log(lines)
        self.take(lines)

    def take(self, lines: list[bytes]) -> None:
        """Print ``lines``, or keep them."""
        if self.keeps_last and lines:
            lines = [*self.last, *lines]
            self.last = [lines.pop()]
        self.show(lines)

    def close(self, as_result: bool) -> None:
        """Print the line that was kept, if any, as it is when it is a result."""
        last, self.last = self.last, []
        if as_result:
            self.sink.write(last)
        else:
            self.show(last)

    def show(self, lines: list[bytes]) -> None:
        """Print ``lines`` with the task's name."""
        self.sink.write([self.prefix + line for line in lines])


@dataclass
class ErrorChannel(Channel):
    """A task's stderr: from a traceback or one of our errors on, lines are held back.

    The supervisor shows them whole when this task turns out to be the one that failed first,
    and drops them when it only fell with the others. A program may also log a traceback and go
    on: the supervisor then calls `release` after a while. ``since`` is when the holding began.
    """

    held: list[bytes] = field(default_factory=list)
    since: float = 0.0

    def take(self, lines: list[bytes]) -> None:
        """Print ``lines`` up to the first that begins an error."""
        if not self.held:
            start = next((i for i, line in enumerate(lines) if begins_error(line)), len(lines))
            self.show(lines[:start])
            lines = lines[start:]
            self.since = time.monotonic()
        self.held += map(bare, lines)

    def release(self) -> None:
        """Print what was held back as ordinary lines."""
        self.show(self.held)
        self.held = []

    @property
    def is_own_error(self) -> bool:
        """Whether what is held is a message of ours, not a traceback."""
        return bool(self.held) and self.held[0].startswith(PREFIX.encode())


def begins_error(line: bytes) -> bool:
    """Whether a traceback starts here (a syntax error's has no heading), or our own message."""
    line = bare(line)
    text = line.lstrip(b" +|")
    return text.startswith(
        (b"Traceback (most recent", b"Exception Group Traceback (most recent")
    ) or line.startswith((PREFIX.encode(), b'  File "'))


def bare(line: bytes) -> bytes:
    """``line`` without the rank that torch.distributed puts before each line of a traceback."""
    return TORCH_RANK.sub(b"", line)
