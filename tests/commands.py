"""Programs as a user starts them: real processes with time limits, of which nothing stays."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO

from spartito.launch.processes.fork_server import Forked, ForkServer, kind_of, new_server
from spartito.launch.processes.local import replica_environment
from spartito.system import ENV_PORTABLE
from spartito.wire import ports
from tests import known_state, stacks

LIMIT = 240.0
SPARTITO = (sys.executable, "-m", "spartito")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MARK = "SPARTITO_TEST_MARK"
SUITE = "TESTED_BY"
"""In the environment of all that one process of pytest starts: which one it is."""
MOST_SERVERS = 2
"""Each has torch in memory."""
SHARED_MEMORY = Path("/dev/shm")
LEAN = known_state.LEAN
OF_OUR_OWN = (
    "SPARTITO_",
    "TF_CONFIG",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "OMP_",
    "TORCH_CPP_",
    "PYTEST_CURRENT_TEST",  # else each test would have an environment unlike all others
)


@dataclass(frozen=True)
class Ended:
    """How a program ended, and all that it printed."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Both streams."""
        return self.out + self.err


class Launched:
    """A program with a fork server of its own, which was forked too, as `subprocess.Popen` has it.

    So no job of a test imports torch, which would take most of its time.
    """

    def __init__(self, words: Sequence[str], forked: Forked) -> None:
        assert forked.stdout is not None
        assert forked.stderr is not None
        self.args, self.pid, self._forked = words, forked.pid, forked
        self.stdout, self.stderr = (
            os.fdopen(os.dup(each.fileno()), errors="replace")
            for each in (forked.stdout, forked.stderr)
        )
        forked.stdout.close()
        forked.stderr.close()
        self._watch = os.pidfd_open(forked.pid)

    def poll(self) -> int | None:
        """How it ended, once it has."""
        return self._forked.poll()

    @property
    def returncode(self) -> int | None:
        """The same, if that is known."""
        return self._forked.returncode

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, when it has; `subprocess.TimeoutExpired` if it does not in time."""
        if self._watch >= 0:
            if not select.select([self._watch], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired([*self.args], timeout or 0.0)
            os.close(self._watch)
            self._watch = -1
        return self._forked.wait()

    def send_signal(self, number: int) -> None:
        """Signal it, if it runs."""
        self._forked.send_signal(number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


@dataclass
class Program:
    """A program that runs; every wait for it has a time limit."""

    popen: subprocess.Popen[str] | Launched
    mark: str
    directory: Path
    _lines: queue.Queue[str | None] = field(default_factory=queue.Queue)
    _out: list[str] = field(default_factory=list)
    _err: list[str] = field(default_factory=list)
    _readers: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        for stream, kept in ((self.popen.stdout, self._out), (self.popen.stderr, self._err)):
            assert stream is not None
            reader = threading.Thread(target=self._read, args=(stream, kept), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, stream: IO[str], kept: list[str]) -> None:
        with stream:
            for line in stream:
                kept.append(line)
                self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern: str, limit: float = LIMIT) -> re.Match[str]:
        """The next line on either stream that ``pattern`` is found in."""
        end = time.monotonic() + limit
        closed = 0
        while closed < 2:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            if line is None:
                closed += 1
            elif found := re.search(pattern, line):
                return found
        raise AssertionError(f"no line with {pattern!r}:\n{self.with_stacks()}")

    def send(self, number: signal.Signals) -> None:
        """Signal the program itself, not what it started."""
        self.popen.send_signal(number)

    def end(self, limit: float = LIMIT) -> Ended:
        """Wait for its end and that of all that it started."""
        try:
            code = self.popen.wait(limit)
        except subprocess.TimeoutExpired as error:
            text = self.with_stacks()
            self.kill()
            raise AssertionError(f"no end within {limit} s:\n{text}") from error
        if not eventually(lambda: not running(self.mark)):
            text = self.with_stacks()
            self.kill()
            raise AssertionError(f"processes are left:\n{text}")
        for reader in self._readers:
            reader.join(limit)
        return Ended(code, "".join(self._out), "".join(self._err))

    def with_stacks(self) -> str:
        """All that it has printed, and then where its processes stand, if any of them run."""
        if stacks.ask(running(self.mark)):
            before = -1
            while before < len(self._err):
                before = len(self._err)
                time.sleep(stacks.QUIET)
        return "".join(self._out + self._err)

    def kill(self) -> None:
        """End it and all that it started, also what starts while we look."""
        assert eventually(self._killed), f"processes are left of {self.popen.args!r}"
        self.popen.wait()

    def _killed(self) -> bool:
        """Whether nothing was left to kill."""
        pids = running(self.mark)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids


class Commands:
    """Starts programs in ``directory``; `close` ends what still runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._programs: list[Program] = []
        OPEN.add(self)

    def start(
        self, *words: str | Path, env: Mapping[str, str] | None = None, forks: bool = False
    ) -> Program:
        """Start ``words``, in an environment that tells nothing of any cluster but ``env``.

        With ``forks`` a Python script is a fork of a process that has torch, as tasks of jobs are.
        """
        mark = secrets.token_hex(8)
        plain = {
            k: v for k, v in os.environ.items() if not k.startswith(OF_OUR_OWN) or k == ENV_PORTABLE
        }
        told = {**plain, "OMP_NUM_THREADS": "1", **(env or {}), MARK: mark}
        if (path := told.get("PYTHONPATH")) != "":  # as a user has it
            told["PYTHONPATH"] = known_state.with_lean(path or "")
        texts = [str(word) for word in words]
        popen = SERVERS.launched(texts, told, self.directory, forks) or subprocess.Popen(
            texts,
            cwd=self.directory,
            env=told,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            bufsize=1,
        )
        self._programs.append(Program(popen, mark, self.directory))
        return self._programs[-1]

    def spartito(self, *words: str | Path, env: Mapping[str, str] | None = None) -> Ended:
        """Run the command ``spartito`` to its end."""
        return self.start(*SPARTITO, *words, env=env).end()

    def python(
        self, *words: str | Path, env: Mapping[str, str] | None = None, forks: bool = False
    ) -> Ended:
        """Run plain ``python`` to its end; ``forks`` as of `start`."""
        return self.start(sys.executable, *words, env=env, forks=forks).end()

    def write(self, name: str, text: str) -> Path:
        """A file in the directory."""
        path = self.directory / name
        path.write_text(text)
        return path

    def close(self) -> None:
        """End all programs."""
        OPEN.discard(self)
        for program in self._programs:
            program.kill()


class Servers:
    """The fork servers of this process of pytest, once tests start jobs.

    There is one for each environment, as of tests whose programs may warn, but for few at a time:
    those of one test alone are not worth a server.
    """

    def __init__(self) -> None:
        self._servers: dict[str, ForkServer] = {}  # the one that was asked last is the last
        self._seen: set[str] = set()
        self._one_at_a_time = threading.Lock()

    def launched(
        self, words: Sequence[str], env: Mapping[str, str], folder: Path, forks: bool
    ) -> Launched | None:
        """A launcher, or with ``forks`` a Python script, as a fork.

        None for other programs, and for an environment that is seldom.
        """
        launches = tuple(words[: len(SPARTITO)]) == SPARTITO
        if not launches and not forks:
            return None
        if env["PYTHONPATH"] != os.environ["PYTHONPATH"]:  # it may find another torch, that waits
            return None
        with self._one_at_a_time, open(os.devnull, "wb") as nobody:
            server = self._server_for(replica_environment(env, 1))
            if server is None:
                return None
            forked = server.start(words, env, nobody.fileno(), folder=folder, launches=launches)
        return None if forked is None else Launched(words, forked)

    def _server_for(self, env: Mapping[str, str]) -> ForkServer | None:
        kind = kind_of(env)
        server = self._servers.pop(kind, None)
        if server is None:
            if len(self._servers) == MOST_SERVERS and kind not in self._seen:
                self._seen.add(kind)
                return None
            server = new_server({name: value for name, value in env.items() if name != MARK})
        if server is None:
            return None
        if not server.wait():
            server.close()
            return None
        self._servers[kind] = server
        if len(self._servers) > MOST_SERVERS:
            self._servers.pop(next(iter(self._servers))).close()
        return server

    def close(self) -> None:
        """End them."""
        for server in self._servers.values():
            server.close()


SERVERS = Servers()

HELD = ExitStack()
"""The ports of the test that runs, until its tasks listen there; closed at its end."""

OPEN: set[Commands] = set()
"""Whose programs may still run."""


def outputs() -> Iterator[tuple[str, str]]:
    """What programs that still run have printed, with the stacks of their processes."""
    for commands in OPEN:
        for program in commands._programs:
            if running(program.mark):
                yield f"running: {program.popen.args!r}", program.with_stacks()


@contextlib.contextmanager
def nothing_left() -> Iterator[set[Path]]:
    """What is mapped in shared memory during the block goes; gives what was seen to be others'.

    Other suites and workers of pytest have files there too, and leave some where they kill who
    shares memory: what one of their processes was seen to hold, or still has, is not looked at.
    """
    before, others, over = set(SHARED_MEMORY.glob("spartito-*")), set[Path](), threading.Event()

    def left() -> list[Path]:
        new = set(SHARED_MEMORY.glob("spartito-*")) - before - others
        others.update(one for one in new if _of_others(one))
        return sorted(new - others)

    def watch() -> None:
        while not over.wait(0.005):
            left()

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield others
        new = set(left())
        assert eventually(lambda: all(map(_told_to_others, new.intersection(left())))), (
            f"left: {left()}"
        )
    finally:
        over.set()
        watching.join()


def _of_others(path: Path) -> bool:
    """Whether a process that this suite has not started holds a lock on ``path``."""
    with contextlib.suppress(OSError):
        stat = path.stat()
        file = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        # 1: FLOCK ADVISORY READ <pid> <device>:<inode> 0 EOF, with "->" before who waits for it
        pids = [int(lock[-4]) for lock in locks if lock[-3] == file]
        return any(not _is_ours(pid) for pid in pids)
    return False


def _told_to_others(path: Path) -> bool:
    """Whether a process that this suite has not started has ``path`` in its environment.

    Tasks have there the folder of their heartbeats, which nobody locks.
    """
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and os.fsencode(path) in (process / "environ").read_bytes():
                return not _is_ours(int(process.name))
    return False


def _is_ours(pid: int) -> bool:
    """Whether this process has started ``pid``, or ``pid`` has ended."""
    with contextlib.suppress(OSError):
        told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return f"{SUITE}={os.environ.get(SUITE, '')}".encode() in told or pid == os.getpid()
    return True


@contextlib.contextmanager
def commands_in(directory: Path) -> Iterator[Commands]:
    """Programs that start in ``directory``, none of which outlives the block."""
    commands = Commands(directory)
    try:
        yield commands
    finally:
        commands.close()


def is_program(pid: int) -> bool:
    """Whether `Commands` started the process ``pid``, or what it started."""
    with contextlib.suppress(OSError):
        return f"{MARK}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def running(mark: str) -> list[int]:
    """The processes that carry ``mark`` in their environment, zombies left out."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
    return found


def eventually(condition: Callable[[], bool], limit: float = 60.0) -> bool:
    """Whether ``condition`` holds before the limit, which no passing test comes near."""
    end, pause = time.monotonic() + limit, 0.01
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(0.1, 1.2 * pause)
    return True


def tf_config(cluster: Mapping[str, Sequence[str]], kind: str, index: int) -> dict[str, str]:
    """``TF_CONFIG`` as a user sets it by hand."""
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def cluster_of(**counts: int) -> dict[str, list[str]]:
    """Free addresses for so many tasks of each role, no two alike."""
    free = iter(addresses(sum(counts.values())))
    return {role: list(islice(free, count)) for role, count in counts.items()}


def addresses(count: int) -> list[str]:
    """Free addresses of the loopback, as `free_ports`."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def free_ports(count: int) -> list[int]:
    """Free ports of the loopback, for tasks of this test: no other program finds them free."""
    return ports.free_ports(count, held=HELD)


def free_port() -> int:
    """As `free_ports`, one."""
    return free_ports(1)[0]
