"""Tasks that are slowed down on purpose: ``--slow``, and the process that does it.

``python -m spartito.launch.processes.throttle PID FRACTION`` lets a process run a
fraction of the time only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import FrameType

from spartito.errors import SpartitoError, UserError, show
from spartito.names import nearest
from spartito.wire.secret import without_secret

FULL = 1.0
"""The fraction of a task that is not slowed down."""

EXAMPLE = "Write it as worker:1=0.25: worker 1 runs a quarter of the time."


def slow_tasks(texts: Iterable[str]) -> dict[str, float]:
    """The fraction of the time that each task runs, of texts like ``worker:1=0.25``.

    Raises `UserError` for another form, a fraction that is not in (0, 1], and a task named twice.
    """
    fractions: dict[str, float] = {}
    for text in texts:
        task, equals, number = text.partition("=")
        if not (task and equals):
            raise UserError(f"--slow {text!r} is not a task and its fraction", EXAMPLE)
        if task in fractions:
            raise UserError(f"--slow names {task} twice", "Give each task one fraction.")
        fractions[task] = read_fraction(number)
    return fractions


def read_fraction(text: str) -> float:
    """The fraction that ``text`` says; `UserError` if it is none, or not in (0, 1]."""
    try:
        fraction = float(text)
    except ValueError:
        raise UserError(f"the fraction {text!r} is not a number", EXAMPLE) from None
    if not 0 < fraction <= FULL:
        raise UserError(f"the fraction {fraction:g} is not above 0 and at most 1", EXAMPLE)
    return fraction


def fractions_of(names: Sequence[str], slow: Mapping[str, float]) -> list[float]:
    """The fraction of each task of ``names`` (as ``worker 1``); ``slow`` says ``worker:1``.

    Raises `UserError` for a task that is not among ``names``.
    """
    known = [name.replace(" ", ":") for name in names]
    for task in slow:
        if task not in known:
            raise UserError(
                f"{task!r} is to be slow, but is not a task that starts here", nearest(task, known)
            )
    return [slow.get(task, FULL) for task in known]


def start_throttle(
    pid: int, fraction: float, before_exec: Callable[[], None] | None
) -> subprocess.Popen[bytes]:
    """Start what lets process ``pid`` run only ``fraction`` of the time (see `throttle`)."""
    return subprocess.Popen(
        [sys.executable, "-m", "spartito.launch.processes.throttle", str(pid), repr(fraction)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=without_secret(os.environ),
        start_new_session=True,
        preexec_fn=before_exec,  # safe: we have one thread
    )


PERIOD = 0.02
"""Seconds of one turn of running and standing still."""

LONGEST = 1.0
"""Seconds that the process stands still at most in one turn, even if we overslept before."""


def throttle(pid: int, fraction: float) -> None:
    """Let process ``pid`` run ``fraction`` of the time, in (0, 1], until it ends.

    Where it has a process group of its own, its children are throttled with it. However
    this ends (an exception of a signal handler too), the process runs on at full speed.
    """
    try:
        send = os.killpg if os.getpgid(pid) == pid else os.kill
    except ProcessLookupError:
        return
    idle = (1 - fraction) / fraction
    owed = 0.0  # seconds to stand still; what one turn did too long, the next does shorter
    try:
        while True:
            began = time.monotonic()
            time.sleep(PERIOD * fraction)
            os.kill(pid, 0)  # a group may outlive its leader
            send(pid, signal.SIGSTOP)
            stopped = time.monotonic()
            owed = min(LONGEST, owed + (stopped - began) * idle)
            time.sleep(max(0.0, owed))
            send(pid, signal.SIGCONT)
            owed -= time.monotonic() - stopped
    except ProcessLookupError:
        return
    finally:
        with suppress(ProcessLookupError):
            send(pid, signal.SIGCONT)


def main(argv: Sequence[str]) -> int:
    """Throttle the process that ``argv`` (PID FRACTION) names; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _end)
    try:
        if len(argv) != 2 or not (argv[0].isascii() and argv[0].isdigit() and int(argv[0])):
            raise UserError(
                f"{' '.join(argv)!r} is not a process id and a fraction",
                "Write it as: python -m spartito.launch.processes.throttle 4711 0.25",
            )
        throttle(int(argv[0]), read_fraction(argv[1]))
    except SpartitoError as error:
        return show(error)
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # the end is not to be interrupted
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
