"""Denormal numbers as 0 while we compute: CPUs take up to a hundred times as long for them.

They come by themselves: where a ReLU has died its gradients are 0, so that Adam's means shrink in
every step until they are denormal. The flag of the CPU is one of each thread; threads that start
later inherit it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from functools import cache, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _Thread(threading.local):
    """Of one thread: how many blocks it is in, and what its flag was before the first."""

    def __init__(self) -> None:
        self.blocks = 0
        self.before: bool | None = None


_thread = _Thread()


class Denormals:
    """Blocks in which a strategy computes: denormal numbers are 0 there, unless it leaves them.

    After the last block of a thread its flag is what it was before the first. Blocks may end in
    another order than they began, as those of iterators do.

    Args:
        flush: Whether they are taken for 0.
    """

    def __init__(self, flush: bool) -> None:
        self._flush = flush
        self._streams: dict[object, int] = {}  # that are open, and their threads

    def __enter__(self) -> None:
        if self._flush:
            _enter()

    def __exit__(self, *error: object) -> None:
        if self._flush:
            _leave()

    def during(self, stream: Iterable[T]) -> Generator[T]:
        """The items of ``stream``, with a block from the first of them to its end.

        Args:
            stream: An iterable; where it is left early, the block ends as the iterator does.

        Returns:
            An iterator over it.
        """
        if not self._flush:
            yield from stream
            return
        block = object()
        self._streams[block] = threading.get_ident()
        _enter()
        try:
            yield from stream
        finally:
            self._end(block)

    def close(self) -> None:
        """End the blocks of iterators that this thread has left open."""
        for block in list(self._streams):
            self._end(block)

    def _end(self, block: object, over: Callable[[], bool] = sys.is_finalizing) -> None:
        """Once, and by its own thread: a garbage collector may run in any.

        One that is still open when the interpreter ends finds no module any more.
        """
        if over():
            return
        if self._streams.get(block) == threading.get_ident():
            del self._streams[block]
            _leave()


class _Computing(Protocol):
    """A strategy, or a part of one."""

    denormals: Denormals


C = TypeVar("C", bound=_Computing)


def flushed(
    method: Callable[Concatenate[C, P], R],
) -> Callable[Concatenate[C, P], R]:
    """Make a method of a strategy a block of its `Denormals`.

    Args:
        method: What computes, or starts threads that do.

    Returns:
        The same method inside of a block.
    """

    @wraps(method)
    def wrapped(self: C, /, *args: P.args, **options: P.kwargs) -> R:
        with self.denormals:
            return method(self, *args, **options)

    return wrapped


def flushes() -> bool:
    """Whether this thread takes denormal numbers for 0 now.

    Returns:
        The flag, which torch can set and not tell.
    """
    smallest = sys.float_info.min  # that is not denormal
    return smallest / 2.0 == 0.0


def _enter() -> None:
    if not _thread.blocks:
        _thread.before = flushes()
        _set(True)
    _thread.blocks += 1


def _leave() -> None:
    _thread.blocks -= 1
    if not _thread.blocks and not _thread.before:
        _set(False)


def _set(flush: bool) -> None:
    """Of this thread, and of the threads among which torch divides its operations."""
    torch.set_flush_denormal(flush)
    threads = torch.get_num_threads()
    if threads > 1:
        _set_pool()(flush, threads)


@cache
def _set_pool() -> Callable[[bool, int], object]:
    """Sets the flag of so many of OpenMP's threads; those that run already inherit nothing.

    torch has no function for it. OpenMP calls one of torch's own in each of them: it takes a bool
    where a function of OpenMP's takes a pointer, and both come in the same register.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        run = library.GOMP_parallel
        flag = ctypes.cast(library._ZN2at7Context16setFlushDenormalEb, ctypes.c_void_p)
    except (OSError, AttributeError):  # another build of torch: its pool stays as it is
        return lambda flush, threads: None
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    run.restype = None
    return lambda flush, threads: run(flag, int(flush), threads, 0)
