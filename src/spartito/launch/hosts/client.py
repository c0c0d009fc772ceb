"""The client side of a task on another machine: ``python -m spartito.launch.hosts.client``.

It runs ssh and ends as the task ended, so that the supervisor sees a task like any other: by the
same exit code, or by the same signal. The task's environment, with the secret, and then signals
go to the remote agent as lines (see `agent`): a command line would show the one, and ssh carries
none of the others. When the connection is lost it ends by SIGHUP. A task that is started again,
perhaps on a machine that is out of reach for a while, is tried until that is there.
"""

from __future__ import annotations

import json
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
from spartito.launch.processes.interrupts import ENDING
from spartito.launch.processes.process import AGAIN
from spartito.names import ENV_SECRET
from spartito.notes import say
from spartito.system import die_with_parent
from spartito.wire.secret import read_secret

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
"""The variable with the first line for the remote agent, but for the secret."""

MOST_BYTES = 60_000
"""Bytes of that line: a pipe takes 65,536 that nobody has read yet."""

REACH_SECONDS = 14.0
"""After so many seconds a connection that ends had been made: ssh takes 10 s to give up."""

RETRY_SECONDS = 2.0

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
    env, secret = json.loads(os.environ.pop(FIRST_LINE, "{}")), read_secret()
    first = first_line(env | ({ENV_SECRET: secret} if secret else {}))
    again = os.environ.pop(AGAIN, "")
    hopeless = False

    def give_up(number: int, frame: FrameType | None) -> None:
        nonlocal hopeless
        hopeless = True

    if again:
        signal.signal(signal.SIGUSR1, give_up)
    while True:
        began = time.monotonic()
        code, told = _run(words, first, int(seconds))
        if hopeless or not (again and code == OF_SSH and time.monotonic() < began + REACH_SECONDS):
            break
        if told:
            return _fall(told)
        time.sleep(RETRY_SECONDS)
    if code == OF_SSH or code < 0:
        say(f"the connection to {host} is lost")
        return _fall(signal.SIGHUP)
    return _fall(code - 128) if code - 128 in FATAL else code


def _run(words: Sequence[str], first: str, seconds: int) -> tuple[int, int]:
    """The exit code of ssh, and the last signal that it was to pass on to end the task, or 0."""
    out, line = os.pipe()
    os.write(line, first.encode())
    told = 0

    def say(number: int, frame: FrameType | None = None) -> None:
        nonlocal told
        told = number if number in ENDING else told
        with suppress(BrokenPipeError):  # ssh has ended
            os.write(line, f"{number}\n".encode())

    for number in PASSED_ON:
        signal.signal(number, say)  # before ssh starts: the pipe keeps what comes meanwhile
    time.sleep(seconds)
    ssh = subprocess.Popen(words, stdin=out, preexec_fn=die_with_parent())
    os.close(out)
    signal.signal(signal.SIGALRM, lambda number, frame: say(0))
    signal.setitimer(signal.ITIMER_REAL, HEARTBEAT, HEARTBEAT)
    code = ssh.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in PASSED_ON:  # there is nobody left to pass them on to
        ends = code == OF_SSH and number in ENDING
        signal.signal(number, signal.SIG_DFL if ends else signal.SIG_IGN)
    os.close(line)
    return code, told


def _fall(number: int) -> int:
    """End by this signal, one of `FATAL`, without a core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number  # not reached: the signal ends us on our way back from the call


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
