from __future__ import annotations

import io
import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.errors import PREFIX
from spartito.launch.processes import output
from spartito.launch.processes.output import (
    Channel,
    ErrorChannel,
    JsonSink,
    LineCutter,
    Sink,
    begins_error,
)


@given(st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"a", b"\n"))))
def test_parts_of_any_size_become_the_lines_of_the_whole(parts: list[bytes]) -> None:
    cutter = LineCutter()
    lines = [line for part in parts for line in cutter.feed(part)]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    lines += cutter.finish()
    whole = b"".join(parts)
    assert b"".join(lines) == whole + (b"" if whole.endswith(b"\n") or not whole else b"\n")


def test_a_line_without_an_end_is_cut_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "LONGEST_LINE", 100)
    cutter = LineCutter()
    lines = [line for _ in range(25) for line in cutter.feed(b"x" * 10)] + cutter.finish()
    assert len(lines) > 1
    assert b"".join(lines).count(b"x") == 250


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def test_only_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Sink.of(io.BytesIO()).prefix("worker 1", 1) == b"[worker 1] "
    zero, one = (Sink.of(Terminal()).prefix("w", index) for index in (0, 1))
    assert zero.startswith(b"\033[")
    assert zero != one
    monkeypatch.setenv("NO_COLOR", "1")
    assert Sink.of(Terminal()).prefix("worker 1", 1) == b"[worker 1] "


class Slow(io.BytesIO):
    def write(self, data: Any, /) -> int:
        return super().write(memoryview(data)[:7])


def test_a_write_that_is_cut_short_goes_on() -> None:
    stream = Slow()
    Sink(stream, False).write([b"a line of words\n", b"another\n"])
    assert stream.getvalue() == b"a line of words\nanother\n"


def test_a_bar_keeps_what_came_after_the_last_carriage_return() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"a\nno bar") == [b"a\n"]
    assert cutter.bar() is None
    for data, bar in ((b"\r1%\r2%", b"2%"), (b" of all", b"2% of all"), (b"\r3%\r", b"3%")):
        assert cutter.feed(data) == []
        assert cutter.bar() == bar
    assert cutter.feed(b"\nnext") == [b"\r3%\r\n"]
    assert cutter.bar() is None


def test_bars_of_several_tasks_and_lines_share_a_stream() -> None:
    stream = io.BytesIO()
    sink = Sink(stream, False)
    sink.write_bar(b"1%", b"[a] ")
    sink.write_bar(b"5%", b"[b] ")
    sink.write([b"\r6%\r\n", b"x\r\n", b"y\rz\n"], b"[b] ")
    sink.write_bar(b"2%", b"[a] ")
    sink.write([b"told\n"])
    assert stream.getvalue() == (
        b"\r[a] 1%\r[b] 5%\r[b] 6%\r\n[b] x\r\n[b] y\r[b] z\n\r[a] 2%\ntold\n"
    )


def test_a_terminal_has_one_line_for_both_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, err = Sink.pair(Terminal(), Terminal())
    err.write_bar(b"1%", b"[a] ")
    out.write([b"line\n"], b"[b] ")
    assert out.stream.getvalue() == b"\r\x1b[K[b] line\n"  # type: ignore[attr-defined]


def test_an_error_behind_a_bar_is_one() -> None:
    stream = io.BytesIO()
    errors = ErrorChannel(-1, Sink(stream, False), b"[w] ")
    errors.take([b"\r3%Traceback (most recent call last):\n", b"ValueError: no\n"])
    assert stream.getvalue() == b"[w] 3%\n"
    assert errors.held == [b"Traceback (most recent call last):\n", b"ValueError: no\n"]
    errors.show_bar(b"4%")
    assert stream.getvalue() == b"[w] 3%\n"


def test_the_last_line_waits_to_be_the_result() -> None:
    for as_result, end in ((True, b"3\n"), (False, b"[w] 3\n")):
        stream = io.BytesIO()
        kept = Channel(-1, Sink(stream, False), b"[w] ", keeps_last=True)
        kept.take([b"1\n"])
        kept.take([b"2\n", b"3\n"])
        assert stream.getvalue() == b"[w] 1\n[w] 2\n"
        kept.close(as_result)
        assert stream.getvalue() == b"[w] 1\n[w] 2\n" + end


def test_from_a_traceback_on_lines_are_held_back_until_released() -> None:
    stream = io.BytesIO()
    errors = ErrorChannel(-1, Sink(stream, False), b"[w] ")
    errors.take([b"before\n", b"Traceback (most recent call last):\n", b'  File "x"\n'])
    errors.take([b"ValueError: no\n"])
    assert stream.getvalue() == b"[w] before\n"
    assert len(errors.held) == 3
    assert not errors.is_own_error
    errors.release()
    assert stream.getvalue().endswith(b"[w] ValueError: no\n")
    errors.take([PREFIX.encode() + b"no\n"])
    assert errors.is_own_error


def test_torchs_rank_is_left_out_of_an_error() -> None:
    errors = ErrorChannel(-1, Sink(io.BytesIO(), False), b"[w] ")
    errors.take([b"[rank12]: Traceback (most recent call last):\n", b"[rank12]: E: [rank12]: x\n"])
    assert errors.held == [b"Traceback (most recent call last):\n", b"E: [rank12]: x\n"]


def test_a_pipe_is_drained_without_waiting_for_others_that_hold_it() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    stream = io.BytesIO()
    try:
        os.write(write, b"one\ntwo")
        Channel(read, Sink(stream, False), b"[w] ").drain()
    finally:
        os.close(read)
        os.close(write)
    assert stream.getvalue() == b"[w] one\n[w] two\n"


@pytest.mark.parametrize(
    "line",
    [
        b"Traceback (most recent call last):\n",
        b"  + Exception Group Traceback (most recent call last):\n",
        b'  File "bad.py", line 1\n',
        PREFIX.encode() + b"x\n",
        b"[rank1]: Traceback (most recent call last):\n",
    ],
)
def test_what_begins_an_error(line: bytes) -> None:
    assert begins_error(line)
    assert not begins_error(b"about " + line)


def test_lines_as_json_have_their_task_and_stream() -> None:
    out, err = io.BytesIO(), io.BytesIO()
    first, second = JsonSink.pair(out, err)
    first.write([b'a "line" \xff\n'], first.prefix("worker 1", 1, several=False))
    first.write_bar(b"50%", b"worker 1")
    second.say("note: two share a core")
    first.write_result([b'{"loss": 1}\n'])
    line, result = out.getvalue().splitlines()
    found = json.loads(line)
    assert (found["task"], found["stream"], found["text"]) == (
        "worker 1",
        "stdout",
        'a "line" \ufffd',
    )
    assert result == b'{"loss": 1}'
    said = json.loads(err.getvalue())
    assert (said["task"], said["stream"]) == (None, "stderr")
    assert said["text"] == "spartito: note: two share a core"
