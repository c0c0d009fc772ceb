"""Calls that never return have a limit, and slow ones that move have none."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest

from spartito.storage.limited import SLOWEST, limited


def test_what_returns_or_raises_does_so() -> None:
    assert limited(lambda _: 3, 60.0) == 3
    with pytest.raises(ZeroDivisionError):
        limited(lambda _: 1 // 0, 60.0)


def test_what_never_returns_is_given_up() -> None:
    never = Event()
    with pytest.raises(TimeoutError, match="nothing has moved for 0 s"):
        limited(lambda _: never.wait(), 0.05)
    never.set()


def test_what_moves_and_then_stands_still_is_given_up() -> None:
    never = Event()

    def work(moved: Callable[[], None]) -> None:
        never.wait(0.2)  # the other waits already
        moved()
        never.wait()

    with pytest.raises(TimeoutError):
        limited(work, 0.05, size=SLOWEST << 20)  # whose allowance ends with the first move
    never.set()


def test_a_large_one_may_take_longer_before_anything_moves() -> None:
    late = Event()
    assert limited(lambda _: not late.wait(0.3), 0.01, size=100 * SLOWEST)
