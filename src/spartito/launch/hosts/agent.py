"""The remote agent of a task on another machine: ``python -m spartito.launch.hosts.agent``.

Its stdin is the connection to the launcher. The first line there is a JSON object: the task's
environment, which no command line shows. Every other line is the number of a signal
for the task (SIGTSTP: it stands still until SIGCONT), 0 means that all is well.
When the connection closes, or is silent for too long, the launcher cannot end the task any more:
it ends at once, with all that it started.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from spartito.cluster import tf_config, torchrun
from spartito.device import memory_kills
from spartito.launch.process import out_of_memory
from spartito.launch.reaper import Reaper, die_with_parent
from spartito.names import ENV_SECRET, ENV_SECRET_FILE

HEARTBEAT = 5.0
"""Seconds between two lines from the launcher's machine."""
SILENCE = 18.0
"""Seconds without a line after which the launcher counts as gone.

Less than the 20 s after which ssh there gives up: a task that is started again finds its port
free.
"""

OF_SSH = 255
"""The exit code that ssh keeps for itself."""


def command(argv: Sequence[str], python: str, silence: float = SILENCE) -> list[str]:
    """What runs ``argv`` in the environment of the other machine and what `first_line` says."""
    return [python, "-m", "spartito.launch.hosts.agent", f"{silence:g}", *argv]


def first_line(env: Mapping[str, str]) -> str:
    """``env`` as the first line that a remote agent reads."""
    return json.dumps(dict(env)) + "\n"


def keep(silence: float, env: Mapping[str, str], argv: Sequence[str]) -> int:
    """Run ``argv`` until it ends or the connection does; returns its code, 128 + n after signal n.

    As ssh keeps 255 for itself, a task that ends with it is noted and counts as 1.
    """
    reaper, before = Reaper(), memory_kills()
    try:
        task = subprocess.Popen(
            [os.path.expanduser(argv[0]), *argv[1:]],
            env={**env, **reaper.mark},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent(),  # safe: we have one thread
        )
        reaper.watch([task.pid])
        threading.Thread(target=_listen, args=(task, silence), daemon=True).start()
        code = task.wait()
        if code == -signal.SIGKILL and (why := out_of_memory(memory_kills().since(before))):
            print(f"spartito: the task was killed{why}", file=sys.stderr)
        _kill(task)  # what it left behind
    finally:
        reaper.close()
    if code == OF_SSH:
        print("spartito: exit code 255 becomes 1: ssh has 255 for itself", file=sys.stderr)
        return 1
    return code if code >= 0 else 128 - code


def main(argv: Sequence[str]) -> int:
    """Run what `command` names, in this machine's environment and that of the first line."""
    silence = float(argv[0])
    line = _read_line(silence)
    if not line:
        return 1  # the launcher is gone
    silent = {tf_config.VARIABLE, *torchrun.VARIABLES, ENV_SECRET, ENV_SECRET_FILE}
    own = {name: value for name, value in os.environ.items() if name not in silent}
    return keep(silence, own | json.loads(line), argv[1:])


def _read_line(silence: float) -> bytes:
    """The first line of stdin, and not a byte more; nothing where it does not come whole."""
    text = b""
    while select.select([0], [], [], silence)[0] and (char := os.read(0, 1)):
        if char == b"\n":
            return text
        text += char
    return b""


def _listen(task: subprocess.Popen[bytes], silence: float) -> None:
    """Pass signals on until the connection ends; then end the task."""
    text = b""
    try:
        while select.select([0], [], [], silence)[0] and (data := os.read(0, 4096)):
            *lines, text = (text + data).split(b"\n")
            for number in map(int, lines):
                if number in (signal.SIGTSTP, signal.SIGCONT):
                    _send_all(task, signal.SIGSTOP if number == signal.SIGTSTP else number)
                elif number:
                    task.send_signal(number)
                    task.send_signal(signal.SIGCONT)  # one that is stopped would not see it
    finally:
        _kill(task)


def _kill(task: subprocess.Popen[bytes]) -> None:
    _send_all(task, signal.SIGKILL)


def _send_all(task: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(task.pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
