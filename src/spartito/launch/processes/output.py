"""What the tasks print: whole lines with the task's name before them, errors held back."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, BinaryIO, TextIO, cast

from spartito.errors import PREFIX

LONGEST_LINE = 8 << 20
"""Bytes of one line that are kept in memory; a longer one is cut into several."""

READ_SIZE = 1 << 16
ERASE = b"\r\033[K"
"""To the beginning of the terminal's line, and clear it."""

TORCH_RANK = re.compile(rb"^\[rank\d+\]: ")
BEHIND_A_BAR = re.compile(rb"(\[rank\d+\]: )?Traceback \(most recent|" + re.escape(PREFIX.encode()))
COLOURS = (36, 33, 35, 32, 34, 91, 96, 93)


class TextWriter(io.RawIOBase):
    """Bytes for a stream that takes text alone, as the standard output of a notebook."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        """Write all of ``data`` as text."""
        self._stream.write(self._decoder.decode(data))
        return len(data)

    def flush(self) -> None:
        self._stream.flush()


def binary(stream: TextIO | None) -> BinaryIO:
    """Where to write the bytes of ``stream``; nowhere if it was closed before we began."""
    if stream is None:
        return open(os.devnull, "wb")
    found: BinaryIO = getattr(stream, "buffer", None) or cast("BinaryIO", TextWriter(stream))
    return found


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

    def bar(self) -> bytes | None:
        """What a progress bar shows that rewrites its line by carriage returns; None without any.

        It is what came after the last one (or before one that ends the line). What came before is
        forgotten: nobody would see it any more.
        """
        if not any(b"\r" in part for part in self._parts):
            return None
        line = b"".join(self._parts)
        shown = line.rstrip(b"\r")
        start = max(0, shown.rfind(b"\r"))
        self._parts, self._size = [line[start:]], len(line) - start
        return shown[start:].lstrip(b"\r")

    def finish(self) -> list[bytes]:
        """The line without a newline at the end of the stream, if any; it gets one."""
        return [self._take(b"") + b"\n"] if self._parts else []

    def _take(self, end: bytes) -> bytes:
        line = b"".join([*self._parts, end])
        self._parts.clear()
        self._size = 0
        return line


@dataclass
class Line:
    """The line where the next output goes: ``bar_of`` is the prefix of the bar there, if any."""

    bar_of: bytes | None = None


@dataclass
class Sink:
    """Where lines of all tasks go: one of our own two streams.

    ``erases``: it is a terminal on which a line can be cleared. Two streams that are the same
    terminal have one ``line``. Where the disk is full, lines are lost, which ``tells`` says once:
    a job does not end for them. Who closes our output ends it, as with any program.
    """

    stream: BinaryIO
    coloured: bool
    erases: bool = False
    line: Line = field(default_factory=Line)
    tells: Sink | None = field(default=None, repr=False)
    told: bool = False

    @classmethod
    def of(cls, stream: BinaryIO) -> Sink:
        """Coloured on a terminal that shows colours, unless NO_COLOR asks for none."""
        smart = stream.isatty() and os.environ.get("TERM") != "dumb"
        return cls(stream, smart and not os.environ.get("NO_COLOR"), smart)

    @classmethod
    def pair(cls, out: BinaryIO, err: BinaryIO) -> tuple[Sink, Sink]:
        """One for each of our two streams."""
        sinks = cls.of(out), cls.of(err)
        sinks[0].tells = sinks[1]
        if all(sink.erases for sink in sinks):
            sinks[1].line = sinks[0].line
        return sinks

    def write(self, lines: list[bytes], prefix: bytes = b"") -> None:
        """Print ``lines`` with ``prefix`` before each of them, over a progress bar of the same."""
        if not lines:
            return
        begin = b""
        if self.line.bar_of is not None:
            over = self.erases or self.line.bar_of == prefix
            begin, self.line.bar_of = (self._back if over else b"\n"), None
        self._put(begin + b"".join(prefixed(prefix, line) for line in lines))

    def say(self, text: str) -> None:
        """Print a line of ours."""
        self.write([f"spartito: {text}\n".encode()])

    def write_bar(self, bar: bytes, prefix: bytes) -> None:
        """Show a progress bar in the line where we are, over any other."""
        self._put(self._back + prefix + bar)
        self.line.bar_of = prefix

    @property
    def _back(self) -> bytes:
        return ERASE if self.erases else b"\r"

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:  # without a buffer (python -u) a signal may cut a write short
                rest = rest[self.stream.write(rest) :]
            self.stream.flush()
        except BrokenPipeError:
            self._tell("nobody reads stdout any more: the job ends")
            raise
        except OSError as error:  # later lines are tried nevertheless
            self._tell(f"stdout cannot be written ({error.strerror}): lines of the job are lost")

    def _tell(self, text: str) -> None:
        """Say once on the other stream what is wrong with this one."""
        if not self.told and self.tells is not None:
            self.tells.say(text)
        self.told = True

    def write_result(self, lines: list[bytes]) -> None:
        """Print the result of the job as it is."""
        self.write(lines)

    def prefix(self, name: str, index: int, several: bool = True) -> bytes:
        """What stands before each line of the task ``name``, the ``index``-th of ``several``."""
        if not several:
            return b""
        text = f"[{name}] "
        if self.coloured:
            text = f"\033[{COLOURS[index % len(COLOURS)]}m[{name}]\033[0m "
        return text.encode()


@dataclass
class JsonSink(Sink):
    """Each line as a JSON object: its time, the task (null: the launcher), the stream, the text."""

    name: str = ""

    @classmethod
    def pair(cls, out: BinaryIO, err: BinaryIO) -> tuple[Sink, Sink]:
        """One for each of our two streams."""
        told = cls(err, False, False, name="stderr")
        return cls(out, False, False, tells=told, name="stdout"), told

    def write(self, lines: list[bytes], prefix: bytes = b"") -> None:
        """Print ``lines`` of the task that ``prefix`` names."""
        task = prefix.decode() or None
        self._put(b"".join(as_json(task, self.name, line) for line in lines))

    def write_result(self, lines: list[bytes]) -> None:
        """Print the result of the job as it is."""
        self._put(b"".join(lines))

    def write_bar(self, bar: bytes, prefix: bytes) -> None:
        """A bar is for eyes."""

    def prefix(self, name: str, index: int, several: bool = True) -> bytes:
        """The task's name."""
        return name.encode()


def as_json(task: str | None, stream: str, line: bytes) -> bytes:
    """A line of output as a JSON object on a line; ``task`` is None for the launcher's own."""
    text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    record = {"time": now, "task": task, "stream": stream, "text": text}
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


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
        if (bar := self.cutter.bar()) is not None:
            self.show_bar(bar)
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
            self.sink.write_result(last)
        else:
            self.show(last)

    def show(self, lines: list[bytes]) -> None:
        """Print ``lines`` with the task's name."""
        self.sink.write(lines, self.prefix)

    def show_bar(self, bar: bytes) -> None:
        """Print a progress bar with the task's name."""
        self.sink.write_bar(bar, self.prefix)


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
        lines = [part for line in lines for part in parted(line)]
        if not self.held:
            start = next((i for i, line in enumerate(lines) if begins_error(line)), len(lines))
            self.show(lines[:start])
            lines = lines[start:]
            self.since = time.monotonic()
        self.held += map(bare, lines)

    def show_bar(self, bar: bytes) -> None:
        """Print a progress bar, unless an error is held back that came before it."""
        if not self.held:
            super().show_bar(bar)

    def release(self) -> None:
        """Print what was held back as ordinary lines."""
        self.show(self.held)
        self.held = []

    @property
    def is_own_error(self) -> bool:
        """Whether what is held is a message of ours, not a traceback."""
        return bool(self.held) and self.held[0].startswith(PREFIX.encode())


def prefixed(prefix: bytes, line: bytes) -> bytes:
    """``line`` with ``prefix`` before all that stands at its beginning on a terminal."""
    if not prefix or b"\r" not in line:
        return prefix + line
    text = line.rstrip(b"\r\n")
    return prefix + text.lstrip(b"\r").replace(b"\r", b"\r" + prefix) + line[len(text) :]


def parted(line: bytes) -> list[bytes]:
    """``line``, or a progress bar's line and the error that was written behind it."""
    found = BEHIND_A_BAR.search(line) if b"\r" in line else None
    if found is None:
        return [line]
    return [line[: found.start()] + b"\n", line[found.start() :]]


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
