"""``python -m spartito.launch.throttle PID SHARE``: a process runs only a share of the time."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from spartito.errors import SpartitoError, UserError, show
from spartito.launch.pace import checked_share, read_share

PERIOD = 0.02
"""Seconds of one turn of running and standing still."""

LONGEST = 1.0
"""Seconds that the process stands still at most in one turn, even if we overslept before."""


def throttle(pid: int, share: float) -> None:
    """Let process ``pid`` run ``share`` of the time, in (0, 1], until it ends.

    Where it leads a process group, its children keep step with it. However this ends (an
    exception of a signal handler too), the process runs on at full speed.
    """
    checked_share(share)
    try:
        send = os.killpg if os.getpgid(pid) == pid else os.kill
    except ProcessLookupError:
        return
    idle = (1 - share) / share
    owed = 0.0  # seconds to stand still; what one turn did too long, the next does shorter
    try:
        while True:
            began = time.monotonic()
            time.sleep(PERIOD * share)
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
    """Throttle the process that ``argv`` (PID SHARE) names; answers the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _end)
    try:
        if len(argv) != 2 or not (argv[0].isascii() and argv[0].isdigit() and int(argv[0])):
            raise UserError(
                f"{' '.join(argv)!r} is not a process id and a share",
                "Write it as: python -m spartito.launch.throttle 4711 0.25",
            )
        throttle(int(argv[0]), read_share(argv[1]))
    except SpartitoError as error:
        return show(error)
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # the way out is not to be interrupted
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
