"""How a suite of faults ends what it started."""

from __future__ import annotations

import signal

import pytest

from spartito.chaos.processes import interrupts_held


@pytest.mark.parametrize("came", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_end_of_the_block(came: signal.Signals) -> None:
    done: list[str] = []
    before = signal.signal(came, lambda number, _: done.append(f"end by {number}"))
    try:
        with interrupts_held():
            signal.raise_signal(came)
            done.append("block")
    finally:
        signal.signal(came, before)
    assert done == ["block", f"end by {came}"]
