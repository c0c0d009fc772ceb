"""Progress keeps quiet about short jobs, and says little about long ones."""

from __future__ import annotations

from io import StringIO

from spartito.data.reading.progress import Progress


class Terminal(StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that stands still until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def told(stream: StringIO, seconds: list[float]) -> str:
    """What stands on ``stream`` after one update at each of ``seconds``."""
    clock = Clock()
    with Progress(stream=stream, clock=clock) as progress:
        for done, second in enumerate(seconds, start=1):
            clock.now = 100.0 + second
            progress.update(done, 1000)
    return stream.getvalue()


def test_a_short_job_says_nothing() -> None:
    assert told(StringIO(), [0.1, 1.0, 1.9]) == ""
    assert told(Terminal(), [0.1, 1.0, 1.9]) == ""


def test_a_log_gets_a_line_now_and_then() -> None:
    lines = told(StringIO(), [1, 2, 3, 11, 12.1, 13, 30]).splitlines()
    assert lines == [f"checked {n} of 1000 files" for n in (2, 5, 7)]


def test_a_terminal_gets_a_bar() -> None:
    assert "4/1000" in told(Terminal(), [1, 2.1, 2.15, 3.0])
