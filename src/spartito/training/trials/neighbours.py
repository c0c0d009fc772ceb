"""Forks of this process that compute beside it, so that it can see what that costs."""

from __future__ import annotations

import os
import select
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

from spartito.system import die_with_parent

Work = Callable[[int], Callable[[], object]]
"""Makes ready in the fork of that number, and returns what it then does over and over."""


class Meeting:
    """Where so many forks and the process that makes them wait for each other.

    Args:
        count: The forks.
        limit: Seconds until all have come.
    """

    def __init__(self, count: int, limit: float = 20.0) -> None:
        self._limit = limit
        self._came, self._goes = os.pipe(), [os.pipe() for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for end in (*self._came, *(end for pipe in self._goes for end in pipe)):
            os.close(end)

    def come(self, number: int) -> None:
        """In a fork: wait for all others."""
        os.write(self._came[1], b"1")
        os.read(self._goes[number][0], 1)

    def gather(self) -> None:
        """In the process that made them: wait for all of them, and let them go.

        Raises:
            TimeoutError: They have not come.
        """
        missing = len(self._goes)
        while missing:
            if not select.select([self._came[0]], [], [], self._limit)[0]:
                raise TimeoutError(f"a fork made no step within {self._limit:.0f} s")
            missing -= len(os.read(self._came[0], missing))
        for _, end in self._goes:
            os.write(end, b"1")


class Neighbours:
    """So many forks, each doing the same work until the end of the block.

    They wait after the first turn of their work, until `go_on`. A fork has none of this process's
    threads, so its work makes what it needs.

    Args:
        count: How many there are.
        work: What each does.
        limit: Seconds until all have made their first turn.

    Raises:
        TimeoutError: They have not.
        RuntimeError: One failed; its traceback is on stderr.
    """

    def __init__(self, count: int, work: Work, limit: float = 20.0) -> None:
        self._pids: list[int] = []
        self._count, self._work, self._limit = count, work, limit

    def __enter__(self) -> Self:
        """Fork, and wait until all have made a turn."""
        try:
            for number in range(self._count):
                self._fork(number)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End them, and what they have started."""
        self._end()

    @property
    def pids(self) -> tuple[int, ...]:
        """Their process ids."""
        return tuple(self._pids)

    def pause(self) -> None:
        """None of them computes from now on."""
        self._tell(signal.SIGSTOP)

    def go_on(self) -> None:
        """All of them compute."""
        self._tell(signal.SIGCONT)

    def _fork(self, number: int) -> None:
        arrange = die_with_parent()
        ready, done = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(ready)
            if arrange is not None:
                arrange()
            _compute(partial(self._work, number), done)
        self._pids.append(pid)
        with suppress(OSError):  # it has done so itself
            os.setpgid(pid, pid)
        os.close(done)
        try:
            found, _, _ = select.select([ready], [], [], self._limit)
            if not found:
                raise TimeoutError(f"a fork made no step within {self._limit:.0f} s")
            if not os.read(ready, 1):
                raise RuntimeError("a fork failed in its first step")
        finally:
            os.close(ready)
        os.killpg(pid, signal.SIGSTOP)

    def _tell(self, what: signal.Signals) -> None:
        for pid in self._pids:
            os.killpg(pid, what)

    def _end(self) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._pids.clear()


def _compute(work: Callable[[], Callable[[], object]], done: int) -> None:
    """In the fork: work until we are killed."""
    try:
        os.setpgid(0, 0)
        turn = work()
        turn()
        os.write(done, b"1")
        while True:
            turn()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
