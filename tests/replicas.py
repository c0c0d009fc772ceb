"""Real replica processes for tests: started once, given one job after the other."""

from __future__ import annotations

import gc
import json
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from spartito.cluster.ports import free_ports
from tests.processes import context

Job = Callable[..., Any]


class ReplicaError(AssertionError):
    """A job raised on a replica; ``kind`` is the exception's name, ``text`` its message."""

    def __init__(self, rank: int, kind: str, text: str, trace: str) -> None:
        super().__init__(f"replica {rank}: {kind}: {text}\n{trace}")
        self.rank, self.kind, self.text = rank, kind, text


class Replicas:
    """A pool of processes that play the replicas of one job at a time."""

    def __init__(self) -> None:
        self._pool: list[tuple[Any, Connection]] = []

    def __call__(
        self,
        job: Job,
        world_size: int,
        *args: Any,
        servers: int = 0,
        timeout: float = 100,
        **options: Any,
    ) -> list[Any]:
        """What ``job(*args, **options)`` answers on each of ``world_size`` replicas.

        ``servers`` more processes play parameter servers, which answer nothing.
        """
        while len(self._pool) < world_size + servers:
            self._start()
        cluster = _cluster(world_size, servers)
        members = self._pool[: world_size + servers]
        for rank, (_, pipe) in enumerate(members):
            pipe.send((job, args, options, _environment(rank, world_size, cluster)))
        answers: list[Any] = []
        failure: ReplicaError | None = None
        for rank, (_, pipe) in enumerate(members):
            if not pipe.poll(timeout):
                self.close()
                raise TimeoutError(f"replica {rank} of {job.__name__} gave no answer")
            good, answer = pickle.loads(pipe.recv_bytes())
            answers.append(answer)
            if not good and (failure is None or failure.kind == "TaskLostError"):
                failure = ReplicaError(rank, *answer)
        if failure is not None:
            self.close()
            raise failure
        return answers[:world_size]

    def close(self) -> None:
        """End all processes."""
        for process, pipe in self._pool:
            pipe.close()
            process.kill()
            process.join()
        self._pool.clear()

    def _start(self) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._pool.append((process, ours))


def _cluster(world_size: int, servers: int) -> dict[str, list[str]]:
    told = [f"127.0.0.1:{port}" for port in free_ports(world_size + servers)]
    return {"worker": told[:world_size], "ps": told[world_size:]}


def _environment(rank: int, world_size: int, cluster: dict[str, list[str]]) -> dict[str, str]:
    """torchrun's variables; with servers `TF_CONFIG`, which comes before them."""
    mine = {"type": "worker", "index": rank}
    if rank >= world_size:
        mine = {"type": "ps", "index": rank - world_size}
    config = json.dumps({"cluster": cluster, "task": mine})
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": cluster["worker"][0].rpartition(":")[2],
        "TF_CONFIG": config if cluster["ps"] else "",
    }


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["SPARTITO_TIMEOUT"] = "20"
    while True:
        try:
            job, args, options, environment = pipe.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            answer = (True, job(*args, **options))
        except SystemExit as end:  # a server has served
            answer = (not end.code, None)
        except BaseException as error:
            answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
        pipe.send_bytes(pickle.dumps(answer))  # torch's own pickler would share the tensors
        gc.collect()
