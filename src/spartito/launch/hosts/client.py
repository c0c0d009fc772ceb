"""The client side of a task on another machine: ``python -m spartito.launch.hosts.client``.

It runs ssh and ends as the task ended, so that the supervisor sees a task like any other: by the
same exit code, or by the same signal. The task's environment and then signals
go to the remote agent as lines (see `agent`): a command line would show the one, and ssh carries
none of the others. When the connection is lost it ends by SIGHUP.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from spartito.launch.hosts.agent import HEARTBEAT, OF_SSH, first_line
from spartito.launch.reaper import die_with_parent

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (*ENDING, signal.SIGTSTP, signal.SIGCONT)

FATAL = frozenset(
    {
        *ENDING,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGKILL,
        signal.SIGQUIT,
        signal.SIGSEGV,
    }
)
"""By these a task ends when nobody handles them; an exit code of 128 + n means one."""

FIRST_LINE = "SPARTITO_FIRST_LINE"
"""The variable with the first line for the remote agent."""

MOST_BYTES = 60_000
"""Bytes of that line: a pipe takes 65,536 that nobody has read yet."""

AT_ONCE = 8
"""Connections that one machine gets at once: sshd begins to drop them at 10 (MaxStartups)."""


def command(host: str, ssh: Sequence[str], index: int = 0) -> list[str]:
    """What runs the command ``ssh`` for a task on ``host``, the ``index``-th there."""
    seconds = str(index // AT_ONCE)
    return [sys.executable, "-m", "spartito.launch.hosts.client", host, seconds, *ssh]


def main(argv: Sequence[str]) -> int:
    """Run ``HOST SECONDS SSH...``, after so many seconds.

    Returns the task's exit code, or ends by its signal.
    """
    host, seconds, *words = argv
    out, line = os.pipe()
    os.write(line, os.environ.pop(FIRST_LINE, first_line({})).encode())

    def say(number: int, frame: FrameType | None = None) -> None:
        with suppress(BrokenPipeError):  # ssh has ended
            os.write(line, f"{number}\n".encode())

    for number in PASSED_ON:
        signal.signal(number, say)  # before ssh starts: the pipe keeps what comes meanwhile
    time.sleep(int(seconds))
    ssh = subprocess.Popen(words, stdin=out, preexec_fn=die_with_parent())
    os.close(out)
    signal.signal(signal.SIGALRM, lambda number, frame: say(0))
    signal.setitimer(signal.ITIMER_REAL, HEARTBEAT, HEARTBEAT)
    code = ssh.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    if code == OF_SSH or code < 0:
        print(f"spartito: the connection to {host} is lost", file=sys.stderr, flush=True)
        return _fall(signal.SIGHUP)
    return _fall(code - 128) if code - 128 in FATAL else code


def _fall(number: int) -> int:
    """End by this signal, one of `FATAL`, without a core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number  # not reached: the signal ends us on our way back from the call


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
