"""A signal that comes while a launcher starts a program."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

from spartito.launch.containers.engine import run
from spartito.launch.containers.job import Interrupted, interrupts
from spartito.launch.processes.interrupts import ENDING, interrupts_held
from tests.launch.supervised import LIMIT, is_alive


@pytest.mark.parametrize("came", ENDING)
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


def test_what_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_that_comes_at_the_end_of_the_block_swallows_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put, done = signal.signal, []

    def end(number: int, _: object) -> None:
        done.append(number)
        raise Interrupted(number)

    def late(number: int, handler: Any) -> Any:
        """As the first of the handlers is back, its signal comes."""
        old = put(number, handler)
        if handler is end and not done:
            signal.raise_signal(number)
        return old

    before = {number: signal.signal(number, end) for number in ENDING}
    try:
        with pytest.raises(Interrupted), interrupts_held():
            monkeypatch.setattr(signal, "signal", late)
        assert len(done) == 1
        for number in set(ENDING) - set(done):
            with pytest.raises(Interrupted):
                signal.raise_signal(number)
            assert signal.getsignal(number) is end
        assert set(done) == set(ENDING)
    finally:
        monkeypatch.undo()
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("came", ENDING)
def test_a_program_of_the_engine_that_is_just_starting_ends_with_us(
    came: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Interrupting(subprocess.Popen[str]):
        """A signal comes when the program runs, and nobody has noted that."""

        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            started.append(self.pid)
            signal.raise_signal(came)

    monkeypatch.setattr(subprocess, "Popen", Interrupting)
    try:
        with pytest.raises(Interrupted), interrupts():
            run(["sleep", "100"], LIMIT)
        (pid,) = started
        assert not is_alive(pid)
    finally:
        for pid in filter(is_alive, started):
            os.kill(pid, signal.SIGKILL)
