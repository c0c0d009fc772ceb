"""Forks of this process that compute beside it, so that it can see what that costs."""

from __future__ import annotations

import os
import select
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from spartito.system import die_with_parent

Work = Callable[[], Callable[[], object]]
"""Makes ready in the fork, and returns what it then does over and over."""


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
            for _ in range(self._count):
                self._fork()
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

    def _fork(self) -> None:
        arrange = die_with_parent()
        ready, done = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(ready)
            if arrange is not None:
                arrange()
            _compute(self._work, done)
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


def _compute(work: Work, done: int) -> None:
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
