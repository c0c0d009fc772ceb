"""Reading ahead in background threads, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from spartito.cluster.resolver import replicas_here
from spartito.system.capacity import available_cores

MOST_THREADS = 16
"""Threads that read, at most: each has a whole batch in the making."""

T = TypeVar("T")


def reading_threads(waits: bool = False) -> int:
    """How many threads of a task read: its cores, divided among the replicas of the machine.

    Args:
        waits: Whether each waits for a store: of two threads one decodes meanwhile.
    """
    cores = max(1, available_cores() // replicas_here())
    return min(MOST_THREADS, 2 * cores if waits else cores)


def read_ahead(tasks: Iterator[Callable[[], T]], depth: int, threads: int) -> Generator[T]:
    """The results of ``tasks`` in their order, up to ``depth`` of them made ahead of time.

    With depth 0 each is made when it is asked for. Closing the iterator ends the threads.
    """
    if depth == 0:
        for task in tasks:
            yield task()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="spartito-data") as pool:
        yield from read_ahead_in(pool, tasks, depth)


def read_ahead_in(
    pool: ThreadPoolExecutor, tasks: Iterator[Callable[[], T]], depth: int
) -> Generator[T]:
    """As `read_ahead`, in threads that last: closing the iterator waits until they rest."""
    ahead: deque[Future[T]] = deque()
    try:
        for task in tasks:
            ahead.append(pool.submit(task))
            if len(ahead) > depth:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        wait([future for future in ahead if not future.cancel()])
