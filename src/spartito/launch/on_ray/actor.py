"""The actor of a task: it starts the task on its node, passes on what it prints, and ends with it.

The task itself is a process that `hosts.agent` keeps, as on machines that ssh reaches: when the
actor ends, for whatever reason, so does the connection between them, and the task at once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from spartito.errors import UserError
from spartito.launch.functions import task
from spartito.launch.hosts import agent
from spartito.launch.target import check_program
from spartito.wire.interfaces import own_name
from spartito.wire.ports import free_port

MOST = 1 << 20
"""Bytes of one output that are passed on at once."""
SILENCE = 1.0
"""Seconds after which an actor that is asked for output says that there is none.

It does one thing at a time, so that is how long a signal may wait. With several at a time its main
thread would wake up a hundred times a second, on a core where a task computes.
"""


@dataclass(frozen=True, slots=True)
class Node:
    """Where an actor is: the address of its node, a free port there, and what it cannot run.

    Its ``niceness`` is that of its task: Ray gives its workers 15, and a task cannot take it back.
    ``script`` is a checksum of the script there, as `checksum_of` has it.
    """

    host: str
    name: str
    port: int
    versions: Mapping[str, str]
    problem: str = ""
    niceness: int = 0
    script: str = ""

    def __str__(self) -> str:
        return f"{self.host} ({self.name})"


@dataclass(frozen=True, slots=True)
class Output:
    """What a task printed since the last time, and how it ended; None: it runs."""

    out: bytes = b""
    err: bytes = b""
    code: int | None = None


class TaskActor:
    """Runs one task; Ray makes an actor of this class."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._agent: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._over = threading.Event()

    def find(self, folder: str | None, argv: Sequence[str], ports: tuple[int, int] | None) -> Node:
        """Say where this is, and whether ``argv`` can run in ``folder`` here."""
        import ray

        host = str(ray.util.get_node_ip_address())
        allowed = None if ports is None else range(ports[0], ports[1] + 1)
        port, problem, script = 0, "", ""
        try:
            port = free_port(host, allowed=allowed, held=self._held)
            check_runnable(folder, argv)
            script = checksum_of(argv)
        except Exception as error:
            problem = str(error)
        return Node(host, own_name(), port, versions(), problem, os.nice(0), script)

    def start(self, argv: Sequence[str], env: Mapping[str, str], call: bytes | None) -> None:
        """Start the task; what is to be called is written into a folder of this node."""
        self._held.close()
        if call is not None:
            self._folder = self._folder or Path(tempfile.mkdtemp(prefix="spartito-"))
            (self._folder / task.CALL).write_bytes(call)
            argv = [*argv, str(self._folder)]
        words = agent.command([sys.executable, *argv], sys.executable)
        self._agent = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        self._send(agent.first_line(env))
        threading.Thread(target=self._beat, daemon=True).start()

    def read(self) -> Output:
        """Wait for what it prints, or for its end."""
        process = self._agent
        assert process is not None
        assert process.stdout is not None
        assert process.stderr is not None
        streams = [one for one in (process.stdout, process.stderr) if not one.closed]
        ready = select.select(streams, [], [], SILENCE)[0] if streams else []
        found = {stream: os.read(stream.fileno(), MOST) for stream in ready}
        for stream, data in found.items():
            if not data:
                stream.close()
        over = process.stdout.closed and process.stderr.closed
        code = process.wait() if over else None
        return Output(found.get(process.stdout, b""), found.get(process.stderr, b""), code)

    def signal(self, number: int) -> None:
        """Pass a signal on to the task."""
        self._send(f"{number}\n")

    def take(self, name: str) -> bytes | None:
        """A file that the called function left."""
        path = None if self._folder is None else self._folder / name
        return path.read_bytes() if path is not None and path.exists() else None

    def close(self) -> None:
        """End the task, if it still runs, and leave nothing behind."""
        self._over.set()
        if self._agent is not None and self._agent.stdin is not None:
            self._agent.stdin.close()  # it ends the task
            self._agent.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, line: str) -> None:
        if self._agent is not None and self._agent.stdin is not None:
            with suppress(BrokenPipeError, ValueError):
                self._agent.stdin.write(line.encode())

    def _beat(self) -> None:
        """Tell the agent that we are there, as long as we are."""
        while not self._over.wait(agent.HEARTBEAT):
            self._send("0\n")


def check_runnable(folder: str | None, argv: Sequence[str]) -> None:
    """Go to the folder, and raise `UserError` where Python could not run ``argv`` there."""
    try:
        if folder is not None:
            os.chdir(folder)
    except OSError as error:
        raise UserError(
            f"the folder {folder} cannot be entered: {error.strerror}",
            "The job's folder has to be on every node, at the same path: share it, or copy it.",
        ) from error
    is_module = argv[0] == "-m"
    try:
        check_program(argv[is_module:], is_module)
    except UserError as error:
        what = str(error).splitlines()[0]
        if is_module:
            raise UserError(what, "Install its package on every node.") from error
        raise UserError(
            what, f"It has to be on every node, as it is here: share {folder}, or copy it."
        ) from error


def checksum_of(argv: Sequence[str]) -> str:
    """Of the script that ``argv`` begins with; nothing for a module or a folder."""
    path = Path(argv[0])
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def versions() -> dict[str, str]:
    """What must be the same in all tasks of a job."""
    return {"Python": platform.python_version(), "Spartito": version("spartito")}
