"""Jobs with parameter servers whose tasks are processes that a test may hold, stop and kill."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from spartito.errors import SpartitoError, show
from spartito.ps.client.link import Link
from spartito.ps.scheduler.coordinator import Coordinator
from spartito.ps.server.server import Server
from spartito.training.evaluation.evaluator import Evaluator
from spartito.wire.frames import Wire
from tests.commands import cluster_of, tf_config
from tests.processes import context
from tests.strategies.ps_jobs import FINE, LIMIT, Asked, train, with_servers

SHORT = 3.0  # seconds: where a test waits for a limit, which begins when all have met


# Processes


def shorten() -> None:
    """End this task's waits for others after `SHORT` from now on."""
    for one in gc.get_objects():
        if isinstance(one, Link):
            one._timeout = SHORT
        if isinstance(one, Coordinator | Server):
            one.timeout = SHORT
        if isinstance(one, Evaluator):
            one._limit = SHORT
        if isinstance(one, Wire) and one.timeout is not None:
            one.timeout = SHORT


def _run(pipe: Connection, folder: Path, name: str, environment: dict[str, str]) -> None:
    """One task in a process of its own: as ``python script.py`` runs it."""
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    torch.set_num_threads(1)

    def hurry(number: int, frame: object) -> None:
        shorten()
        pipe.send("short")

    signal.signal(signal.SIGUSR1, hurry)

    def wait() -> None:
        pipe.send("held")
        while not pipe.poll(0.05):
            pass  # a signal that comes just before a read blocks is not heard before its end
        pipe.recv()

    code = 0
    try:
        asked: Asked = pipe.recv()
        torch.save(train(asked, wait), folder / f"{name}.pt")
    except Exception as error:
        if asked.lives and asked.fails == name:  # as in a notebook
            print(f"caught {error}", flush=True)
            wait()
        elif isinstance(error, SpartitoError):
            code = show(error)
        else:
            raise
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
    sys.exit(code)


@dataclass
class Member:
    """One task of a job that runs."""

    name: str
    process: Any
    pipe: Connection
    log: Path

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.log.read_text() if self.log.exists() else ""


class Job:
    """The tasks of one cluster on this machine."""

    def __init__(
        self, folder: Path, asked: Asked, environment: dict[str, str], **counts: int
    ) -> None:
        self.folder, self.asked = folder, asked
        self.cluster = cluster_of(**counts)
        self.members: dict[str, Member] = {}
        self.codes: dict[str, int] = {}
        self._environment = environment

    def start(
        self, *names: str, asked: Asked | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """Start these tasks, or start them again."""
        for name in names:
            role, _, index = name.partition(" ")
            ours, theirs = context.Pipe()
            environment = self._environment | tf_config(self.cluster, role, int(index))
            environment |= env or {}
            process = context.Process(
                target=_run, args=(theirs, self.folder, name, environment), daemon=True
            )
            process.start()
            theirs.close()
            ours.send(asked or self.asked)
            self.members[name] = Member(name, process, ours, self.folder / f"{name}.log")

    def held(self, *names: str) -> None:
        """Wait until these tasks are in the batch in which they wait."""
        for name in names:
            self._hear(name, "held")

    def shorten(self, *names: str) -> None:
        """Let these tasks wait for no other longer than `SHORT` from now on."""
        self.signal(signal.SIGUSR1, *names)
        for name in names:
            self._hear(name, "short")

    def _hear(self, name: str, word: str) -> None:
        pipe = self.members[name].pipe
        came = pipe.poll(LIMIT)
        with contextlib.suppress(EOFError):  # it has ended
            came = came and pipe.recv() == word
        assert came, f"{name} did not get there:\n{self.text}"

    def go(self, *names: str) -> None:
        """Let tasks that wait go on."""
        for name in names:
            self.members[name].pipe.send("go")

    def signal(self, number: signal.Signals, *names: str) -> None:
        """Send a signal."""
        for name in names:
            os.kill(self.members[name].process.pid, number)

    def kill(self, *names: str) -> None:
        """End tasks as the kernel does when memory is short."""
        self.signal(signal.SIGKILL, *names)
        for name in names:
            self.members[name].process.join(LIMIT)

    def ends(self, *names: str) -> list[int]:
        """How these tasks end; all are waited for."""
        codes = []
        for name in names:
            member = self.members[name]
            member.process.join(LIMIT)
            assert member.process.exitcode is not None, f"{name} does not end:\n{self.text}"
            codes.append(member.process.exitcode)
            self.codes[name] = codes[-1]
        return codes

    def finish(self) -> None:
        """All that still run are to end well."""
        names = [name for name in self.members if self.members[name].process.exitcode is None]
        assert self.ends(*names) == [0] * len(names), self.text

    def said(self, name: str, pattern: str) -> bool:
        """Whether a task printed something like this."""
        return re.search(pattern, self.members[name].text) is not None

    def result(self, name: str) -> dict[str, Any]:
        """What `train` returned there."""
        found: dict[str, Any] = torch.load(self.folder / f"{name}.pt", weights_only=False)
        return found

    def record(self, name: str) -> dict[str, Any]:
        """What a task did, by the run's records."""
        path = self.folder / "run" / "tasks" / f"{name.replace(' ', '-')}.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    @property
    def text(self) -> str:
        """What all printed."""
        return "".join(f"--- {m.name}\n{m.text}" for m in self.members.values())

    def close(self) -> None:
        """End all that still run."""
        for member in self.members.values():
            if member.process.exitcode is None:
                member.process.kill()
            member.process.join(LIMIT)
            member.process.close()
            member.pipe.close()


@contextlib.contextmanager
def job(
    folder: Path,
    asked: Asked,
    *,
    start: bool = True,
    timeout: float = 60,
    lease: float = 10.0,
    snapshots: float = 1000.0,
    **counts: int,
) -> Iterator[Job]:
    """A job of so many ``worker``, ``ps``, ``chief``, ``evaluator``, which leaves nothing behind.

    ``snapshots`` are the seconds between two of them.
    """
    seconds = {"lease_seconds": lease, "snapshot_seconds": snapshots}
    folders = {"push_log": str(folder / "pushes"), "snapshot_dir": str(folder / "snapshots")}
    known = {"min_shard_bytes": FINE, **seconds, **folders}
    options = with_servers(asked.options, **known) if "ps" in counts else asked.options
    filled = {**asked.__dict__, "options": options}
    filled["run_dir"] = str(folder / "run")
    made = Job(folder, Asked(**filled), {"SPARTITO_TIMEOUT": str(timeout)}, **counts)
    try:
        if start:
            for role, count in counts.items():
                made.start(*(f"{role} {index}" for index in range(count)))
        yield made
    except BaseException as error:
        error.add_note(f"What the tasks have printed:\n{made.text}")
        raise
    finally:
        made.close()
