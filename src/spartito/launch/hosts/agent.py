"""The remote agent of a task on another machine: ``python -m spartito.launch.hosts.agent``.

Its stdin is the connection to the launcher. The first line there is a JSON object: the task's
environment, which no command line shows; the secret in it reaches the task by a file. Every other
line is the number of a signal for the task (SIGTSTP: it stands still until SIGCONT), 0 means that
all is well.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from spartito.cluster import resolve, tf_config, torchrun
from spartito.cluster.limits import notice_limit, time_limit
from spartito.launch.processes.heartbeats import Heartbeats
from spartito.launch.processes.process import out_of_memory
from spartito.launch.processes.reaper import Reaper
from spartito.names import ENV_RECOVERY, ENV_SECRET, ENV_SECRET_FILE, ENV_STORE
from spartito.notes import say
from spartito.system import die_with_parent, end_within
from spartito.system.capacity import memory_kills

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
    name = _name_in(env)
    beats = Heartbeats(
        lambda text: _say(text.removeprefix(f"{name} ")), notice=notice_limit(None, env)
    )
    reaper, before = Reaper(str(beats.folder)), memory_kills()
    try:
        task = subprocess.Popen(
            [os.path.expanduser(argv[0]), *argv[1:]],
            env=beats.begin(name, {**env, **reaper.mark}),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_before_task(reaper),  # safe: we have one thread
        )
        reaper.watch([task.pid])
        is_replaced = env.get(ENV_RECOVERY) and env.get(ENV_STORE) and "evaluator" not in name
        kept = _Kept(name, task, gives_up=time_limit(env=env) if is_replaced else None)
        threading.Thread(target=_listen, args=(kept, silence), daemon=True).start()
        code = _wait(kept, beats)
        if code == -signal.SIGKILL:
            why, beat = out_of_memory(memory_kills().since(before)), beats.beat_of(name)
            if why or beat:
                _say(f"was killed{why}{f' ({beat})' if beat else ''}")
        _kill(task)  # what it left behind
    finally:
        beats.close()
        reaper.close()
    if code == OF_SSH:
        say("exit code 255 becomes 1: ssh has 255 for itself")
        return 1
    return code if code >= 0 else 128 - code


def _before_task(reaper: Reaper) -> Callable[[], None]:
    """What the task runs before its program; it hears a Ctrl-C, which Ray keeps from all it starts.

    As the task has a session of its own, only the launcher sends it one.
    """
    die, enlist = die_with_parent(), reaper.enlist()

    def arrange() -> None:
        enlist()
        if die is not None:
            die()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))

    return arrange


@dataclass
class _Kept:
    """The task as its heartbeats are looked at."""

    name: str
    popen: subprocess.Popen[bytes]
    paused: bool = False
    starts: int = 1
    awaited: bool = False
    gives_up: float | None = None
    missed: str = ""

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def code(self) -> int | None:
        return self.popen.returncode

    def end(self) -> None:
        _kill(self.popen)


def _name_in(env: Mapping[str, str]) -> str:
    """Which task has this environment."""
    with suppress(Exception):  # the task says it itself
        return str(resolve(env).task)
    return "the task"


def _say(text: str) -> None:
    """Tell the launcher of the task, whose name it prints before the line."""
    say(f"the task {text}")


def _wait(task: _Kept, beats: Heartbeats) -> int:
    """Until it ends, saying what is unusual; returns its code."""
    while True:
        if end_within(task.popen, beats.every):
            return task.popen.wait()
        if not task.paused:
            beats.look([task])


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


def _listen(kept: _Kept, silence: float) -> None:
    """Pass signals on until the connection ends; then end the task."""
    task, text = kept.popen, b""
    try:
        while select.select([0], [], [], silence)[0] and (data := os.read(0, 4096)):
            *lines, text = (text + data).split(b"\n")
            for number in map(int, lines):
                if number in (signal.SIGTSTP, signal.SIGCONT):
                    kept.paused = number == signal.SIGTSTP
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
