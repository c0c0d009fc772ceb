"""Signals and notices that tell a training to end soon, and what comes of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from types import FrameType
from typing import Any, Self

from spartito.errors import PreemptedError, UserError
from spartito.notes import warn
from spartito.steps.task_end import PREEMPTING, Again, die_of, is_caught

POLL_SECONDS = 1.0
"""Between two looks for a notice."""

Source = str | os.PathLike[str] | Callable[[], object]
"""A file that appears, or a function that returns something true."""


class Notice:
    """What tells this task to end while a `fit` runs: here nothing does.

    Only a warning comes of the signals that mean nothing else: by default they end a process.
    """

    text = ""
    """What came; empty: nothing."""

    at_once = False
    """Whether this task has nothing to save, and leaves where it is."""

    @property
    def came(self) -> bool:
        """Whether this task was told to end."""
        return False

    def leave(self, why: str) -> None:
        """All tasks have stopped after the same step: save and leave."""

    def __enter__(self) -> Self:
        """Begin to listen."""
        self._before: dict[int, Any] = {}
        for number in self._signals():
            if current_thread() is main_thread() and not is_caught(number):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        """Listen no more."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _signals(self) -> Sequence[int]:
        return signal.SIGUSR1, signal.SIGUSR2

    def _take(self, number: int, frame: FrameType | None) -> None:
        warn(
            "%s came, and training goes on: fit(callbacks=[sp.callbacks.BackupAndRestore(...)]) "
            "would save, and end for another run to go on.",
            signal.Signals(number).name,
        )


class Preemption(Notice):
    """A notice that is followed: all tasks hear of it with the next step, and leave after it.

    A second SIGTERM ends this process at once, whatever it waits for.

    Args:
        save: Saves all that another run needs; all tasks call it.
        signals: Those that are a notice.
        source: A notice beside signals, looked for every second in a thread; None: no other.
    """

    def __init__(
        self,
        save: Callable[[], str],
        signals: Sequence[int] = PREEMPTING,
        source: Source | None = None,
    ) -> None:
        self.text = ""
        self._save, self._numbers, self._source = save, signals, source
        self._again = Again()

    @property
    def came(self) -> bool:
        return bool(self.text)

    def leave(self, why: str) -> None:
        raise PreemptedError(f"{why}; {self._save()}")

    def __enter__(self) -> Self:
        self.text, self._left, self._again = "", Event(), Again()
        super().__enter__()
        self._before |= {n: signal.signal(n, self._take) for n in self._rest()}
        if self._source is not None:
            Thread(
                target=self._look, args=(self._left,), name="spartito notice", daemon=True
            ).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        super().__exit__(*error)

    def _rest(self) -> list[int]:
        """Signals that somebody else's handler had: they asked us."""
        mine = current_thread() is main_thread()
        return [n for n in self._numbers if mine and n not in self._before]

    def _signals(self) -> Sequence[int]:
        return self._numbers

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._again.came(number):
            die_of(number)
        self.text = self.text or signal.Signals(number).name
        if self.at_once:
            raise PreemptedError(self.text)

    def _look(self, left: Event) -> None:
        source = self._source
        look = source if callable(source) else Path(source or "").exists
        told = f"{source}" if not callable(source) else "a notice"
        while not left.wait(POLL_SECONDS):
            with suppress(OSError):  # what cannot be read says nothing
                if look():
                    self.text = self.text or told
                    return


def numbers_of(signals: Sequence[str | int]) -> tuple[int, ...]:
    """The numbers of ``signals`` by their names, as "SIGTERM" or "TERM"; `UserError` for others."""
    try:
        return tuple(
            signal.Signals[f"SIG{each.removeprefix('SIG')}"]
            if isinstance(each, str)
            else signal.Signals(each)
            for each in signals
        )
    except (KeyError, ValueError):
        raise UserError(
            f"signals={tuple(signals)!r}", 'Name some, as ("SIGTERM", "SIGUSR1").'
        ) from None
