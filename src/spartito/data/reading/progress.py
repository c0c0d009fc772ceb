"""How far a long job is, told on standard error once it is clear that it takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self, TextIO

PATIENCE = 2.0
"""Seconds before the first word: a short job needs none."""
LINE_EVERY = 10.0
"""Seconds between two lines in a log; a bar on a terminal moves ten times a second."""


class Progress:
    """A bar of rich on a terminal, a plain line now and then elsewhere."""

    def __init__(
        self,
        what: str = "checked",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        things: str = "files",
    ) -> None:
        """``what`` is the verb that stands before the counts; ``stream`` is standard error."""
        self._what, self._things = what, things
        self._stream = stream or sys.stderr
        self._clock = clock
        self._next = clock() + PATIENCE
        self._bar: Callable[[int, int], None] | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Start counting; nothing is shown yet."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Take the bar away."""
        self._open.close()

    def update(self, done: int, total: int) -> None:
        """Say that ``done`` of ``total`` things are done, if it is time to say something."""
        now = self._clock()
        if now < self._next:
            return
        if self._stream.isatty():
            self._next = now + 0.1
            self._bar = self._bar or self._start_bar()
            self._bar(done, total)
        else:
            self._next = now + LINE_EVERY
            print(f"{self._what} {done} of {total} {self._things}", file=self._stream, flush=True)

    def _start_bar(self) -> Callable[[int, int], None]:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        bar = RichProgress(
            *RichProgress.get_default_columns()[:2],
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(file=self._stream),
            transient=True,
        )
        self._open.enter_context(bar)
        task = bar.add_task(self._what)
        return lambda done, total: bar.update(task, completed=done, total=total)
