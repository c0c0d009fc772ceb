"""Tasks are forked from one process that has imported torch, where a machine starts several.

Importing takes seconds of a core and 200 MB for each process, which is most of a small job's start.
A fork has it all in milliseconds, shares its memory until somebody writes there, and a task that is
started again is there at once. To the launcher it is a child like any other.

A program that starts several jobs, as a comparison does, has such a server once: it starts the
launchers, each with a server of its own that has all of it too.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import IO, Self

from spartito.cluster import tf_config
from spartito.cluster.address_list import ENV_ADDRESS
from spartito.errors import UserError
from spartito.launch.processes import forked_task
from spartito.launch.processes.forked_task import PADDING, READY
from spartito.launch.processes.gpus import count_gpus
from spartito.launch.processes.process import Child, Process
from spartito.launch.target import module_file
from spartito.names import ENV_FORK, ENV_FORK_SERVER, ENV_SECRET
from spartito.system import ENV_PORTABLE, adopt_orphans, die_with_parent
from spartito.system.tpus import attached

OWN = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", tf_config.VARIABLE, ENV_ADDRESS, ENV_SECRET})
"""Variables that only tasks have: who one is, and its secret, which is in no environment that
``/proc`` shows. No module reads them when it is imported."""

LIMIT = 10.0
"""Seconds for a fork: one that takes longer does not come, as where the server was stopped.

Meanwhile the launcher sees nothing else.
"""

OURS = "SPARTITO_"
"""How variables begin that no module reads when it is imported, but for `ENV_PORTABLE`."""

LATE = frozenset({"TMPDIR", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
"""Others that no module reads then: tasks of one job have the same."""

BEYOND, LONGEST = 1 << 14, 1 << 12
"""Bytes for what tasks have in their environment beyond the server, and for their command line."""

TICK = 0.05
"""Seconds after which a wait asks whether it is to end."""

PROGRAM = ("-P", "-c", f"__import__({forked_task.__name__!r}, fromlist=['main']).main()")
"""It defines nothing in ``__main__``, which becomes the task's own."""

AMD = Path("/dev/kfd")


def gains(program: Sequence[str]) -> bool:
    """Whether a program starts sooner, and no otherwise, with torch in its process.

    It asks for more than Python's own modules, as all do that train, and sets no variable itself:
    libraries read some, as ``OMP_NUM_THREADS``, when they are imported, which has been by then.

    Args:
        program: A script or ``-m`` and a module, and its arguments.
    """
    return _gains(tuple(program))


@cache
def _gains(program: tuple[str, ...]) -> bool:
    module = program[1] if program[0] == "-m" else None
    try:
        path = Path(program[0]) if module is None else module_file(module)
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError, UserError):
        return False  # Python says it
    is_other = any(map(_imports_others, nodes)) if module is None else _is_other(module)
    return is_other and not any(map(_changes_environment, nodes))


def _imports_others(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(_is_other(alias.name) for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.level > 0 or _is_other(node.module or ""))


def _is_other(module: str) -> bool:
    return module.partition(".")[0] not in sys.stdlib_module_names


def _changes_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return _is_environment(node.value) and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        changes = node.func.attr in ("setdefault", "update", "pop", "clear")
        return node.func.attr == "putenv" or (changes and _is_environment(node.func.value))
    return isinstance(node, ast.AugAssign) and _is_environment(node.target)


def _is_environment(node: ast.expr) -> bool:
    return "environ" in (getattr(node, "attr", ""), getattr(node, "id", ""))


def _opened(file: int | None) -> IO[bytes] | None:
    return None if file is None else os.fdopen(file, "rb", buffering=0)


class Forked:
    """A process that was forked, and ours to wait for; the descriptors are what it prints into."""

    def __init__(self, pid: int, stdout: int | None = None, stderr: int | None = None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout, self.stderr = _opened(stdout), _opened(stderr)

    def poll(self) -> int | None:
        """As `Child.poll`."""
        return self._ended(os.WNOHANG)

    def wait(self) -> int:
        """As `Child.wait`."""
        code = self._ended(0)
        assert code is not None
        return code

    def send_signal(self, sig: int) -> None:
        """As `Child.send_signal`."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def _ended(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def kind_of(env: Mapping[str, str]) -> str:
    """What environments have in common with which modules are the same once they are imported.

    Args:
        env: Of a task, or of the server.

    Returns:
        A digest: environments have secrets.
    """
    read = sorted(
        (name, value)
        for name, value in env.items()
        if name not in OWN | LATE and (name == ENV_PORTABLE or not name.startswith(OURS))
    )
    return hashlib.sha256(repr(read).encode()).hexdigest()


def can_be_forked(process: Process) -> bool:
    """Whether a process may be a fork: a Python program of this machine."""
    python, *program = process.argv
    runs = program[:1] == ["-m"] or bool(program and program[0].endswith(".py"))
    is_ours = not process.remote and python == sys.executable
    return is_ours and runs and process.env.get(ENV_FORK) != "0"


def largest(processes: Sequence[Process]) -> Process | None:
    """One of those that are alike, which are most; None where no two are, or none may be forked."""
    kinds = Counter(kind_of(process.env) for process in processes if can_be_forked(process))
    for kind, count in kinds.most_common(1):
        found = (one for one in processes if can_be_forked(one) and kind_of(one.env) == kind)
        return next(found) if count > 1 else None
    return None


class ForkServer:
    """The process that others are forked from.

    Args:
        asks: Where it is asked.
        process: It, a child of ours.
        kind: Of the environments that it is for, as `kind_of` has it.
    """

    def __init__(self, asks: socket.socket, process: Child, kind: str) -> None:
        self._asks, self._process, self._kind = asks, process, kind
        self._has_imported = False

    @classmethod
    def begun(cls, env: Mapping[str, str], mark: Mapping[str, str] = MappingProxyType({})) -> Self:
        """A new one, which begins to import.

        Args:
            env: As tasks have it.
            mark: Further variables, by which the processes of a job are found.
        """
        asks, asked = socket.socketpair()
        own = {name: value for name, value in env.items() if name not in OWN}
        with asked:
            process = subprocess.Popen(
                [sys.executable, *PROGRAM, str(asked.fileno()), "." * LONGEST],
                env={**own, **mark, PADDING: "." * BEYOND},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[asked.fileno()],
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        return cls(asks, process, kind_of(env))

    @classmethod
    def inherited(cls) -> Self | None:
        """The one that was started with this process, the first time that somebody asks."""
        said = os.environ.pop(ENV_FORK_SERVER, "")
        if not said:
            return None
        owner, pid, asks, kind = said.split()
        if int(owner) != os.getpid():  # it is another's
            return None
        return cls(socket.socket(fileno=int(asks)), Forked(int(pid)), kind)

    def wait(self, stop: Callable[[], bool] = bool) -> bool:
        """Wait until it has imported all.

        Args:
            stop: Whether nothing is to be started any more.

        Returns:
            Whether it has; else it will start nothing.
        """
        while not self._has_imported and not stop():
            ready, _, _ = select.select([self._asks], [], [], TICK)
            if ready and self._line() != READY:
                return False
            self._has_imported = bool(ready)
        return self._has_imported

    def is_for(self, env: Mapping[str, str]) -> bool:
        """Whether modules are the same in an environment as they are here."""
        return kind_of(env) == self._kind

    def can_start(self, process: Process) -> bool:
        """Whether a process is one of those that it starts."""
        fits = can_be_forked(process) and self.is_for(process.env)
        return fits and gains(process.argv[1:]) and self._process.poll() is None

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        enlists: int,
        streams: Sequence[int] | None = None,
        folder: Path | None = None,
        launches: bool = False,
    ) -> Forked | None:
        """Fork a task, or start a launcher with a fork of this server as its own; see `inherited`.

        Args:
            words: The Python that runs here and its program.
            env: Its whole environment.
            enlists: Where it writes its process group before it does anything.
            streams: Its stdin, stdout and stderr; None: it has nothing to read, and prints into
                pipes.
            folder: Where it starts; None: where we are.
            launches: Whether it is a launcher, which imports no torch itself.

        Returns:
            The process; None for one of another Python, where the server is gone, or stood still
            and was ended, and where a task's folder has modules of the names of some that are
            imported.

        Raises:
            OSError: As of a fork.
        """
        if words[0] != sys.executable:
            return None
        request = {"program": words[1:], "env": dict(env), "kind": self._kind if launches else ""}
        request["folder"] = str(Path.cwd() if folder is None else folder)
        self._asks.settimeout(LIMIT)
        begins, go = os.pipe()
        reads, writes = zip(os.pipe(), os.pipe(), strict=True) if streams is None else ((), ())
        adopt_orphans(True)
        try:
            with open(os.devnull, "rb") as nothing:
                given = [nothing.fileno(), *writes] if streams is None else streams
                socket.send_fds(self._asks, [b"+"], [*given, enlists, begins])
                self._asks.sendall(json.dumps(request).encode() + b"\n")
                pid = int(self._line() or 0)
            if pid > 0:
                os.write(go, b"+")
        except (ConnectionError, TimeoutError):
            self._process.send_signal(signal.SIGKILL)  # one that stands still would fork it later
            pid = 0
        finally:
            adopt_orphans(False)
            for file in (*writes, begins, go):
                os.close(file)
        if pid > 0:
            return Forked(pid, *reads)
        for file in reads:
            os.close(file)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return None

    def _line(self) -> bytes:
        """What the server says; nothing where it is gone."""
        with self._asks.makefile("rb") as lines:
            return lines.readline()

    def close(self) -> None:
        """End it; what was forked goes on."""
        self._asks.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def new_server(
    env: Mapping[str, str], mark: Mapping[str, str] = MappingProxyType({})
) -> ForkServer | None:
    """A server as it begins to import.

    Args:
        env: As tasks have it.
        mark: As of `ForkServer.begun`.

    Returns:
        It, or the one that this process was started with; None on a system other than Linux, and
        where there are accelerators, whose drivers do not survive a fork.
    """
    if env.get(ENV_FORK) == "0":
        return None
    if (found := ForkServer.inherited()) is not None:
        if found.is_for(env):
            return found
        found.close()
    if not adopt_orphans(True):
        return None
    adopt_orphans(False)
    if count_gpus(env) or AMD.exists() or attached() is not None:
        return None
    return ForkServer.begun(env, mark)


@dataclass
class Forks:
    """The server of the jobs that this process supervises, one after the other.

    Args:
        stays: Whether it is there for the next job too, which then starts in a moment.
    """

    stays: bool = False
    _server: ForkServer | None = None

    def begin(
        self, processes: Sequence[Process], mark: Mapping[str, str], stop: Callable[[], bool]
    ) -> None:
        """Have a server for a job, where that can be.

        That is the one of before, the one that this process was started with, or one that is new,
        if several processes are alike.

        Args:
            processes: All tasks that start here.
            mark: As of `ForkServer.begun`.
            stop: As of `ForkServer.wait`.
        """
        if self._server is None:
            self._server = ForkServer.inherited()
        if self._server is not None and not any(map(self._server.can_start, processes)):
            self.close()
        one = largest(processes)
        if self._server is None and one is not None and gains(one.argv[1:]):
            self._server = new_server(one.env, {} if self.stays else mark)
        if self._server is not None and not self._server.wait(stop):
            self.close()

    def start(
        self,
        process: Process,
        env: Mapping[str, str],
        enlists: int,
        streams: Sequence[int] | None = None,
    ) -> Forked | None:
        """A process as a fork; None where it cannot be one, else as `ForkServer.start`."""
        if self._server is None or not self._server.can_start(process):
            return None
        return self._server.start(process.argv, env, enlists, streams)

    def end(self) -> None:
        """A job starts nothing any more."""
        if not self.stays:
            self.close()

    def close(self) -> None:
        """End the server, if there is one."""
        if self._server is not None:
            self._server.close()
            self._server = None
