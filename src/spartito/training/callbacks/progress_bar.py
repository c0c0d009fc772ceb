"""Shows how far the training is: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from spartito.errors import UserError
from spartito.report.figures import BOOKKEEPING, OF_GROUPS, clock_time, figure, scalars
from spartito.training.callback import Callback, Logs

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_EVERY = 5.0
"""Seconds between two lines in a log, besides the one at the end of an epoch."""
_NEVER = float("inf")


class Display(Protocol):
    """Where progress is shown."""

    every: float
    """Seconds between two calls of `step`."""

    def step(self, title: str, done: int, total: int | None, figures: str) -> None:
        """Show the epoch so far."""

    def epoch(self, title: str, figures: str) -> None:
        """Show what an epoch came to; this stays."""

    def close(self) -> None:
        """Leave the terminal as it was found; calling it again changes nothing."""


class ProgressBar(Callback):
    """Shows step, loss, metrics, examples/s, time left, and how long it waited for data.

    On a terminal a bar; elsewhere a plain line at most every five seconds. Each epoch ends in a
    line with its exact figures, validation too. The metrics shown within an epoch are those of
    the chief's rows. The chief alone writes. Between two refreshes a step costs one look at the
    clock.

    Args:
        refresh_seconds: How often a bar is drawn anew.
        stream: Where to; None: standard output.
        clock: What tells the time, in seconds.

    Raises:
        UserError: ``refresh_seconds`` is not more than 0.
    """

    def __init__(
        self,
        refresh_seconds: float = 0.5,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is shown before training begins; ``clock`` returns seconds."""
        if not refresh_seconds > 0:
            raise UserError(f"refresh_seconds is {refresh_seconds}", "It must be more than 0.")
        self.refresh_seconds = refresh_seconds
        self._stream = stream
        self._clock = clock
        self._display: Display = Silence()
        self._next = _NEVER
        self._title = ""
        self._mark: tuple[float, int] | None = None

    def on_train_begin(self) -> None:
        """Choose the display."""
        self._display.close()
        self._display = self._choose() if self.trainer.is_chief else Silence()

    def on_epoch_begin(self, epoch: int) -> None:
        """Start the clock."""
        self._title = f"epoch {epoch + 1}/{self.trainer.epochs}"
        self._mark = None
        self._next = -_NEVER if self._display.every < _NEVER else _NEVER

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Show the step when it is time to."""
        if self._clock() >= self._next:
            self._show(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Show all figures of the epoch."""
        speed = {name: logs[name] for name in BOOKKEEPING if name in logs}
        seconds = [clock_time(speed["seconds"])] if "seconds" in speed else []
        self._display.epoch(self._title, _join(_figures(logs), *seconds, *_speed(speed)))
        self._next = _NEVER

    def on_train_end(self) -> None:
        """Give the terminal back."""
        self._display.close()

    def on_train_error(self, error: BaseException) -> None:
        """Give the terminal back before the traceback comes."""
        self._display.close()

    def _choose(self) -> Display:
        stream = self._stream or sys.stdout
        if stream.isatty() and os.environ.get("TERM") != "dumb":
            return Bar(stream, self.refresh_seconds)
        return Lines(stream)

    def _show(self, batch: int, logs: Logs) -> None:
        now = self._clock()
        self._next = now + self._display.every
        if self._mark is None:  # the first step warms up: time is counted from its end
            self._mark = now, batch
            return
        began, first = self._mark
        total = self.trainer.steps_per_epoch
        done = batch + 1
        left: list[str] = []
        if total is not None and batch > first:
            seconds = (now - began) / (batch - first) * max(total - done, 0)
            left = [f"{clock_time(seconds)} left"]
        speed = {
            "examples_per_second": self.trainer.examples_per_second,
            "data_wait_fraction": self.trainer.data_wait_fraction,
        }
        self._display.step(self._title, done, total, _join(_figures(logs), *left, *_speed(speed)))


class Silence:
    """The display of all replicas but the chief."""

    every = _NEVER

    def step(self, title: str, done: int, total: int | None, figures: str) -> None:
        """Show nothing."""

    def epoch(self, title: str, figures: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """There is nothing to close."""


class Lines:
    """Plain lines, for a log."""

    every = LINE_EVERY

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def step(self, title: str, done: int, total: int | None, figures: str) -> None:
        """Print where the epoch is."""
        position = f"step {done}" if total is None else f"step {done}/{total}"
        print(_join(title, position, figures), file=self._stream, flush=True)

    def epoch(self, title: str, figures: str) -> None:
        """Print what the epoch came to."""
        print(_join(title, figures), file=self._stream, flush=True)

    def close(self) -> None:
        """There is nothing to close."""


class Bar:
    """A bar on a terminal, which goes when the epoch ends and leaves a line."""

    def __init__(self, stream: TextIO, every: float) -> None:
        from rich.console import Console  # takes 60 ms to import
        from rich.progress import TaskID

        self.every = every
        self._console = Console(file=stream, highlight=False)
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def step(self, title: str, done: int, total: int | None, figures: str) -> None:
        """Draw the bar; a short epoch never comes to it."""
        position = f"{done}" if total is None else f"{done}/{total}"
        bar = max(8, min(24, self._console.width // 6))
        width = self._console.width - len(title) - bar - len(position) - 4
        fields: dict[str, Any] = {
            "title": title,
            "position": position,
            "figures": figures[: max(width, 0)],
        }
        if self._progress is None:
            self._progress = self._make(bar)
            self._task = self._progress.add_task("", total=total, completed=done, **fields)
            self._progress.start()
        self._progress.update(self._task, completed=done, refresh=True, **fields)

    def epoch(self, title: str, figures: str) -> None:
        """Take the bar away and leave the epoch's figures."""
        self.close()
        self._console.print(title, style="bold", end="  ", markup=False)
        self._console.print(figures, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = None

    def _make(self, bar: int) -> Progress:
        from rich.progress import BarColumn, Progress, TextColumn

        return Progress(
            TextColumn("{task.fields[title]}", "bold", markup=False),
            BarColumn(bar),
            TextColumn("{task.fields[position]}", markup=False),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self._console,
            auto_refresh=False,  # a thread of its own would take time from the training
            transient=True,
        )


def _join(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _figures(logs: Logs) -> str:
    shown = {
        name: value
        for name, value in scalars(logs).items()
        if name not in BOOKKEEPING and not name.startswith(OF_GROUPS)
    }
    return _join(*(f"{name} {figure(name, value)}" for name, value in shown.items()))


def _speed(logs: Logs) -> list[str]:
    rate, waiting = logs.get("examples_per_second"), logs.get("data_wait_fraction")
    parts = {
        "{} examples/s": None if rate is None else figure("examples_per_second", rate),
        "waiting for data {}": None if waiting is None else figure("data_wait_fraction", waiting),
    }
    return [text.format(value) for text, value in parts.items() if value is not None]
