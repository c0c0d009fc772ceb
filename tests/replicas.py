"""Real replica processes for tests: started once, given one job after the other.

What strategies warn of there, by Python's warnings or in our log, fails the test, unless the job
expects it (`warns`); so does an exception that Python only prints, as of a socket left open.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils._pytree import tree_map

from spartito.notes import logger
from spartito.wire.ports import free_ports
from tests import stacks
from tests.processes import context

Job = Callable[..., Any]


def warns(*patterns: str) -> Callable[[Job], Job]:
    """Marks a job that may be warned of what begins with one of ``patterns``, in any process."""

    def marked(job: Job) -> Job:
        _EXPECTED[job] = patterns
        return job

    return marked


_EXPECTED: dict[Job, tuple[str, ...]] = {}


def on_host(found: Any) -> Any:
    """What holds tensors of a device, as a process can read it that has none."""

    def copied(value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) and not value.is_cpu else value

    return tree_map(copied, found)


NO_BF16 = "this CPU has no bf16 instructions"
"""What "bf16" says on a CPU that computes it step by step."""

OF_SERVERS = (r"ps \d+ \(.*\): worker \d+ pushed a gradient with a norm of",)
"""Whether a gradient looks absurd depends on the order of pushes, in any job with servers."""


class ReplicaError(AssertionError):
    """A job raised on a replica; ``kind`` is the exception's name, ``text`` its message."""

    def __init__(self, rank: int, kind: str, text: str, trace: str) -> None:
        super().__init__(f"replica {rank}: {kind}: {text}\n{trace}")
        self.rank, self.kind, self.text = rank, kind, text


class Replicas:
    """A pool of processes that play the replicas of one job at a time.

    Args:
        begin: What each does first.
    """

    def __init__(self, begin: Callable[[], object] | None = None) -> None:
        self._begins = begin
        self._pool: list[tuple[Any, Connection]] = []
        self._is_usable = True
        self._held = ExitStack()  # ports, which no other program finds free

    def __call__(
        self,
        job: Job,
        world_size: int,
        *args: Any,
        servers: int = 0,
        timeout: float = 100,
        chief: int = 0,
        **options: Any,
    ) -> list[Any]:
        """What ``job(*args, **options)`` returns on each of ``world_size`` replicas.

        ``servers`` more processes play parameter servers, which return nothing. With ``chief`` the
        first one is a chief that computes nothing.
        """
        members = self._begin(job, world_size, servers, args, options, chief)
        try:
            end = time.monotonic() + timeout
            found = [self._receive(rank, job, end) for rank in range(len(members))]
            failures = [ReplicaError(rank, *x) for rank, (good, x) in enumerate(found) if not good]
            # Whoever lost another task is not the cause.
            for failure in sorted(failures, key=lambda one: one.kind == "TaskLostError"):
                raise failure
        except (ReplicaError, TimeoutError):
            self.close()  # the others may be anywhere in their job
            raise
        except BaseException:  # a time limit, which shows where they stand
            self._is_usable = False
            raise
        return [returned for _, returned in found[:world_size]]

    def outcomes(self, job: Job, world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
        """What each of ``world_size`` replicas returns, or its `ReplicaError`: some may die."""
        members, found = self._begin(job, world_size, 0, args, {}), list[Any]()
        end = time.monotonic() + timeout
        try:
            for rank in range(len(members)):
                try:
                    good, outcome = self._receive(rank, job, end)
                    found.append(outcome if good else ReplicaError(rank, *outcome))
                except ReplicaError as died:
                    found.append(died)
        finally:
            self.close()
        return found

    def _begin(
        self, job: Job, world_size: int, servers: int, args: Any, options: Any, chief: int = 0
    ) -> list[tuple[Any, Connection]]:
        """Have the first processes of the pool do a job."""
        if not self._is_usable:
            self.close()
        while len(self._pool) < world_size + servers:
            self._start()
        self._held.close()
        cluster = _cluster(world_size, servers, chief, self._held)
        members = self._pool[: world_size + servers]
        self._is_usable = False  # until all have the job
        for rank, (_, pipe) in enumerate(members):
            pipe.send((job, args, options, _environment(rank, world_size, cluster)))
        self._is_usable = True
        return members

    def _receive(self, rank: int, job: Job, end: float) -> tuple[bool, Any]:
        """Whether the job of ``rank`` succeeded, and what it returned."""
        process, pipe = self._pool[rank]
        if not pipe.poll(max(0.0, end - time.monotonic())):
            pids = {f"replica {n}": one.pid for n, (one, _) in enumerate(self._pool)}
            raise TimeoutError(
                f"replica {rank} of {job.__name__} returned nothing in time\n{stacks.of(pids)}"
            )
        try:
            good, returned = pickle.loads(pipe.recv_bytes())
        except EOFError:
            process.join()
            raise ReplicaError(
                rank, "ended", f"exit code {process.exitcode}", stacks.written()
            ) from None
        return good, returned

    def close(self) -> None:
        """End all processes."""
        self._held.close()
        for process, pipe in self._pool:
            pipe.close()
            process.kill()
            process.join()
        self._pool.clear()
        self._is_usable = True

    def _start(self) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._begins), daemon=True)
        process.start()
        theirs.close()
        self._pool.append((process, ours))


def _cluster(world_size: int, servers: int, chief: int, held: ExitStack) -> dict[str, list[str]]:
    ports = free_ports(world_size + servers, held=held)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    tasks = {"worker": addresses[chief:world_size], "ps": addresses[world_size:]}
    return {"chief": addresses[:1], **tasks} if chief else tasks


def _environment(rank: int, world_size: int, cluster: dict[str, list[str]]) -> dict[str, str]:
    """torchrun's variables; with servers `TF_CONFIG`, which comes before them."""
    first = len(cluster.get("chief", ()))
    mine: dict[str, Any] = {"type": "worker", "index": rank - first}
    if rank < first:
        mine = {"type": "chief", "index": rank}
    if rank >= world_size:
        mine = {"type": "ps", "index": rank - world_size}
    config = json.dumps({"cluster": cluster, "task": mine})
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": cluster.get("chief", cluster["worker"])[0].rpartition(":")[2],
        "TF_CONFIG": config if cluster["ps"] else "",
    }


def _serve(pipe: Connection, begin: Callable[[], object] | None) -> None:
    from spartito import strategies

    torch.set_num_threads(1)
    os.environ["SPARTITO_TIMEOUT"] = "60"
    if begin is not None:
        begin()
    remarks = Remarks()
    while True:
        try:
            job, args, options, environment = pipe.recv()
        except EOFError:
            return
        os.environ.update(environment)
        with remarks.only((*_EXPECTED.get(job, ()), *OF_SERVERS)):
            try:
                outcome = (True, job(*args, **options))
            except SystemExit as end:  # a server has served
                outcome = (True, None) if not end.code else (False, _failure(end))
            except BaseException as error:
                outcome = (False, _failure(error))
            strategies._of_the_job.clear()  # as other strategies end with the job's objects
            gc.collect()
            gc.freeze()  # what is left is not looked through again
        if outcome[0] and remarks.unexpected:
            outcome = (False, ("unexpected", "\n".join(remarks.unexpected), ""))
        # torch's own pickler would share the tensors.
        pipe.send_bytes(pickle.dumps(on_host(outcome)))


class Remarks(logging.Handler):
    """What a process is warned of, and exceptions that would only be printed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.unexpected: list[str] = []
        self._expected: tuple[str, ...] = ()
        logger.addHandler(self)
        sys.unraisablehook = lambda found: self._unseen(found.exc_value)
        threading.excepthook = lambda found: self._unseen(found.exc_value)

    @contextmanager
    def only(self, expected: tuple[str, ...]) -> Iterator[None]:
        """Nothing but what is ``expected`` is to be said during the block."""
        self._expected, self.unexpected = expected, []
        with warnings.catch_warnings():
            for pattern in expected:
                warnings.filterwarnings("ignore", pattern)
            yield

    def emit(self, record: logging.LogRecord) -> None:
        """A line of our log."""
        said = record.getMessage()
        if not any(re.match(pattern, said) for pattern in self._expected):
            self.unexpected.append(f"a warning that the job does not expect: {said}")

    def _unseen(self, error: BaseException | None) -> None:
        if error is not None:
            self.unexpected.append("".join(traceback.format_exception(error)))


def _failure(error: BaseException) -> tuple[str, str, str]:
    return type(error).__name__, str(error), traceback.format_exc()
