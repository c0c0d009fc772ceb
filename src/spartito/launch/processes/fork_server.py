"""Tasks are forked from one process that has imported torch, where a machine starts several.

Importing takes seconds of a core and 200 MB for each process, which is most of a small job's start.
A fork has it all in milliseconds, shares its memory until somebody writes there, and a task that is
started again is there at once. To the launcher it is a child like any other.
"""

from __future__ import annotations

import ast
import json
import os
import select
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from spartito.cluster import tf_config
from spartito.cluster.address_list import ENV_ADDRESS
from spartito.errors import UserError
from spartito.launch.processes import forked_task
from spartito.launch.processes.forked_task import PADDING, READY
from spartito.launch.processes.gpus import count_gpus
from spartito.launch.processes.process import Process
from spartito.launch.target import module_file
from spartito.names import ENV_FORK, ENV_SECRET
from spartito.system import adopt_orphans, die_with_parent
from spartito.system.tpus import attached

OWN = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", tf_config.VARIABLE, ENV_ADDRESS, ENV_SECRET})
"""Variables that only tasks have: who one is, and its secret, which is in no environment that
``/proc`` shows. No module reads them when it is imported."""

LIMIT = 10.0
"""Seconds for a fork: one that takes longer does not come, as where the server was stopped.

Meanwhile the launcher sees nothing else.
"""

BEYOND = 4096
"""Bytes for what the launcher adds to the variables of a task, as where its heartbeat is."""

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


class Forked:
    """A task that was forked, and ours to wait for."""

    def __init__(self, pid: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb", buffering=0)
        self.stderr: IO[bytes] | None = os.fdopen(stderr, "rb", buffering=0)

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


def alike(process: Process) -> tuple[object, ...] | None:
    """What processes have in common that can be forked from one; None where it cannot be forked."""
    python, *program = process.argv
    runs = program[:1] == ["-m"] or (program and program[0].endswith(".py"))
    if process.remote or python != sys.executable or not runs or process.env.get(ENV_FORK) == "0":
        return None
    return (*process.argv, *sorted((n, v) for n, v in process.env.items() if n not in OWN))


def largest(processes: Sequence[Process]) -> Process | None:
    """One of those that are alike, which are most; None where no two are, or none may be forked."""
    kinds = Counter(kind for process in processes if (kind := alike(process)) is not None)
    for kind, count in kinds.most_common(1):
        return next(one for one in processes if alike(one) == kind) if count > 1 else None
    return None


class ForkServer:
    """The process that tasks are forked from.

    Args:
        process: A task as all are that it starts.
        mark: Further variables, by which the processes of the job are found.
        enlists: Where a task writes its process group before it does anything.
    """

    def __init__(self, process: Process, mark: Mapping[str, str], enlists: int) -> None:
        self._kind, self._enlists = alike(process), enlists
        python, *program = process.argv
        self._asks, theirs = socket.socketpair()
        env = {name: value for name, value in process.env.items() if name not in OWN}
        padding = BEYOND + sum(len(os.fsencode(n + v)) for n, v in process.env.items() if n in OWN)
        with theirs:
            self._popen = subprocess.Popen(
                [python, *PROGRAM, str(theirs.fileno()), *program],
                env={**env, **mark, PADDING: "." * padding},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def wait(self, wake: int, stop: Callable[[], bool]) -> bool:
        """Wait until it has imported all.

        Args:
            wake: A descriptor that can be read when ``stop`` may have changed.
            stop: Whether nothing is to be started any more.

        Returns:
            Whether it has; else it will start nothing.
        """
        asks = self._asks.fileno()
        while not stop():
            ready, _, _ = select.select([asks, wake], [], [])
            if asks in ready:
                return self._line() == READY
            os.read(wake, 4096)
        return False

    def can_start(self, process: Process) -> bool:
        """Whether a process is one of those that it starts."""
        return alike(process) == self._kind

    def start(self, env: Mapping[str, str]) -> Forked | None:
        """Fork a task, which prints into pipes and has nothing to read.

        Args:
            env: Its whole environment.

        Returns:
            The task; None where the server is gone, or stood still and was ended.

        Raises:
            OSError: As of a fork.
        """
        self._asks.settimeout(LIMIT)
        reads, writes = zip(os.pipe(), os.pipe(), strict=True)
        begins, go = os.pipe()
        adopt_orphans(True)
        try:
            with open(os.devnull, "rb") as nothing:
                files = [nothing.fileno(), *writes, self._enlists, begins]
                socket.send_fds(self._asks, [b"+"], files)
                self._asks.sendall(json.dumps(dict(env)).encode() + b"\n")
                said = int(self._line() or 0)
            if said > 0:
                os.write(go, b"+")
        except (ConnectionError, TimeoutError):
            self._popen.kill()  # one that stands still would fork it later
            said = 0
        finally:
            adopt_orphans(False)
            for file in (*writes, begins, go):
                os.close(file)
        if said > 0:
            return Forked(said, *reads)
        for file in reads:
            os.close(file)
        if said < 0:
            raise OSError(-said, os.strerror(-said))
        return None

    def _line(self) -> bytes:
        """What the server says; nothing where it is gone."""
        with self._asks.makefile("rb") as lines:
            return lines.readline()

    def close(self) -> None:
        """End it; its tasks go on."""
        self._asks.close()
        self._popen.kill()
        self._popen.wait()


def fork_server(
    processes: Sequence[Process], mark: Mapping[str, str], enlists: int
) -> ForkServer | None:
    """Where tasks of a job are forked from.

    Args:
        processes: All tasks that start here.
        mark: As of `ForkServer`, like the next.
        enlists: As there.

    Returns:
        It, as it begins to import; None where no two are alike, for programs that gain nothing by
        it (`gains`), on a system other than Linux, and where there are accelerators, whose drivers
        do not survive a fork.
    """
    one = largest(processes)
    if one is None or not gains(one.argv[1:]) or not adopt_orphans(True):
        return None
    adopt_orphans(False)
    if count_gpus(one.env) or AMD.exists() or attached() is not None:
        return None
    return ForkServer(one, mark, enlists)
